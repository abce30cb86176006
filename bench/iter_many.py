"""What an input without end costs: items/s and memory of client and dispatcher while `iter_many` runs through a generator.

    python bench/iter_many.py [--items N] [--in-order] [--quick]

The prompts come from a generator that keeps nothing, the loop over the results keeps nothing either, so whatever grows is
the pool's. Memory is resident memory, read when a share of the items has been taken; the dispatcher's is what its status
tells and, beside it, what the kernel tells of its process. The peak is that of a hundred readings. "Ahead" is the largest
number of items that the generator was ahead of the loop in that stretch; it can not exceed the window. Every index has to
come exactly once, or the run fails.

Targets: from 10 % of the items to the last neither process grows by more than 4 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import perf_counter

import psutil
from conditions import print_conditions
from figures import at_most, print_table

from enginepool import Pool, SamplingParams

MB = 1e6
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
MAX_GROWTH_MB = 4.0
PARAMS = SamplingParams(max_tokens=16)


class Source:
    """The generator of prompts, and how far it is ahead of the loop."""

    def __init__(self, count: int) -> None:
        self.num_pulled = 0
        self.num_taken = 0
        self.ahead = 0
        self._count = count

    def prompts(self) -> Iterator[str]:
        """Short prompts that differ from each other."""
        for number in range(self._count):
            self.num_pulled += 1
            self.ahead = max(self.ahead, self.num_pulled - self.num_taken)
            yield f"item {number:08d}"


class Memory:
    """Resident megabytes of this process and of the pool's dispatcher."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._client = psutil.Process()
        self._dispatcher = psutil.Process(pool.status().pid)
        self.peak = [0.0, 0.0]

    def sample(self) -> None:
        """Remember the highest of both processes."""
        now = (self._client.memory_info().rss / MB, self._dispatcher.memory_info().rss / MB)
        self.peak = [max(pair) for pair in zip(self.peak, now, strict=True)]

    def read(self) -> tuple[float, float, float]:
        """Client, dispatcher by its status, dispatcher by the kernel."""
        told = self._pool.status().rss_bytes
        return self._client.memory_info().rss / MB, told / MB, self._dispatcher.memory_info().rss / MB


def main() -> None:
    """Run once and print one row a share of the items."""
    args = _parse()
    print_conditions("iter_many: items/s and memory over a long input", args)
    with Pool(engine="echo", workers=args.workers) as pool:
        list(pool.iter_many(["warm up"], PARAMS))
        rows, growth, peak = _run(pool, args)
    print_table(["items taken", "items/s so far", "client MB", "dispatcher MB, status", "dispatcher MB, kernel", "ahead", "target"], rows)
    print(f"peak: client {peak[0]:.1f} MB, dispatcher {peak[1]:.1f} MB")
    print(f"growth from {SHARES[0]:.0%} to the end: client {growth[0]:.1f} MB, dispatcher {growth[1]:.1f} MB")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a long iter_many.")
    parser.add_argument("--workers", type=int, default=2, help="echo workers of the pool")
    parser.add_argument("--items", type=int, help="items of the run (default 1000000, quick 20000)")
    parser.add_argument("--window", type=int, help="items between generator and loop (default: iter_many's own)")
    parser.add_argument("--in-order", action="store_true", help="take results in input order")
    parser.add_argument("--quick", action="store_true", help="a short sanity run; its figures mean little")
    args = parser.parse_args()
    args.items = args.items or (20_000 if args.quick else 1_000_000)
    return args


def _run(pool: Pool, args: argparse.Namespace) -> tuple[list[list[str]], list[float], list[float]]:
    source, memory, seen = Source(args.items), Memory(pool), bytearray(args.items)
    before = memory.read()
    rows = [_row("0", "", before, "", "")]
    marks = {max(1, int(args.items * share)): share for share in SHARES}
    readings = []
    started = perf_counter()
    for index, output in pool.iter_many(source.prompts(), PARAMS, in_order=args.in_order, window=args.window):
        source.num_taken += 1
        _check(seen, index, output.ok)
        if source.num_taken % max(1, args.items // 100) == 0:
            memory.sample()
        if source.num_taken in marks:
            rate = source.num_taken / (perf_counter() - started)
            readings.append(memory.read())
            verdict = _verdict(readings) if source.num_taken == args.items else ""
            rows.append(_row(f"{source.num_taken:,}", f"{rate:,.0f}", readings[-1], f"{source.ahead:,}", verdict))
            source.ahead = 0
    if source.num_taken != args.items:
        raise SystemExit(f"{args.items} items went in, {source.num_taken} came out")
    return rows, _growth(readings), memory.peak


def _check(seen: bytearray, index: int, is_ok: bool) -> None:
    if seen[index] or not is_ok:
        raise SystemExit(f"item {index} came twice or failed")
    seen[index] = 1


def _growth(readings: list[tuple[float, float, float]]) -> list[float]:
    first, last = readings[0], readings[-1]
    return [last[0] - first[0], last[2] - first[2]]


def _verdict(readings: list[tuple[float, float, float]]) -> str:
    return f"growth {at_most(max(_growth(readings)), MAX_GROWTH_MB, ' MB')}"


def _row(taken: str, rate: str, memory: tuple[float, float, float], ahead: str, target: str) -> list[str]:
    return [taken, rate, *(f"{value:.1f}" for value in memory), ahead, target]


if __name__ == "__main__":
    main()

"""What the pool's dispatching costs: round trip and items/s of echo workers, beside a raw loop and a process pool.

    python bench/dispatch.py [--quick]

The raw loop (`raw_hop.py`) is client → forwarder → worker → forwarder → client over ipc in pyzmq and msgspec, each in its own
process, with the pool's own payload structs for every item and the pool's window of unfinished items. All do the same echo
(400-byte prompt in; text, token ids and prompt ids out), which is checked before anything is measured. Round trips are one
item at a time on idle processes; the raw ones go through one worker. "Added hop" is what the pool's own stamps say lies
outside the engine: (arrived − submitted) + (delivered − finished). Items/s are over all items at once; raw messages carry one
item, or 32 as the pool's slices do. All processes of all rows stay up; one row runs at a time, in turns, and every figure is
the median over the rounds (of each round's percentile for round trips).

Targets: round trip p50 ≤ 1.5 × raw; items/s ≥ 0.6 × the faster raw row with slices of 32; items/s ≥ 1.5 × `ProcessPoolExecutor`
without chunks.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from time import perf_counter

from conditions import print_conditions
from echo_work import PARAMS, echo, echo_text, make_prompts, make_request
from figures import at_least, at_most, median, percentile, print_table, spread
from raw_hop import RawLoop

from enginepool import Output, Pool

SLICE = 32
RAW_RATES = [(workers, items) for items in (1, SLICE) for workers in (1, 2)]

Samples = dict[str, list[float]]


def main() -> None:
    """Run all rows in turns and print the two tables."""
    args = _parse()
    print_conditions("dispatch: round trip and items/s", args)
    with ExitStack() as stack:
        raw = {workers: RawLoop(stack, workers) for workers in (1, 2)}
        pool = stack.enter_context(Pool(engine="echo", workers=args.workers))
        executor = stack.enter_context(ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")))
        _check_same_work(pool)
        trips, rates = _measure(args, raw, pool, executor)
    _print_trips(trips)
    _print_rates(rates, args.workers)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what dispatching costs.")
    parser.add_argument("--workers", type=int, default=2, help="echo workers of the pool, and processes of the process pool")
    parser.add_argument("--rounds", type=int, help="rounds over all rows (default 7, quick 2)")
    parser.add_argument("--items", type=int, help="items a round for items/s (default 20000, quick 2000)")
    parser.add_argument("--trips", type=int, help="round trips a round (default 2000, quick 200)")
    parser.add_argument("--quick", action="store_true", help="a short sanity run; its figures mean little")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 7)
    args.items = args.items or (2000 if args.quick else 20000)
    args.trips = args.trips or (200 if args.quick else 2000)
    return args


def _check_same_work(pool: Pool) -> None:
    (prompt,) = make_prompts(1)
    output, result = pool.generate(prompt, PARAMS), echo(make_request(prompt))
    if (output.outputs, output.prompt_token_ids) != (result.outputs, result.prompt_token_ids):
        raise SystemExit("the echo engine and bench/echo_work.py do different work; the comparison would mean nothing")


def _measure(args: argparse.Namespace, raw: dict[int, RawLoop], pool: Pool, executor: ProcessPoolExecutor) -> tuple[Samples, Samples]:
    prompts = make_prompts(args.items)
    few = prompts[: args.trips]
    trips: Samples = defaultdict(list)
    rates: Samples = defaultdict(list)
    for number in range(args.rounds + 1):
        if number == 1:  # the first round warms everything up
            trips.clear()
            rates.clear()
        _add_trips(trips, "raw loop", raw[1].round_trips(few))
        _add_pool_trips(trips, pool, few)
        _add_trips(trips, "ProcessPoolExecutor", _time_each(lambda prompt: executor.submit(echo_text, prompt).result(), few))
        for workers, items in RAW_RATES:
            rates[_raw_name(workers, items)].append(raw[workers].run_many(prompts, items))
        rates["pool"].append(_rate(args.items, lambda: pool.generate_many(prompts, PARAMS)))
        rates["ProcessPoolExecutor"].append(_rate(args.items, lambda: list(executor.map(echo_text, prompts))))
    return trips, rates


def _time_each(call: Callable[[str], object], prompts: Sequence[str]) -> list[float]:
    seconds = []
    for prompt in prompts:
        started = perf_counter()
        call(prompt)
        seconds.append(perf_counter() - started)
    return seconds


def _rate(items: int, call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return items / (perf_counter() - started)


def _add_trips(trips: Samples, name: str, seconds: Sequence[float]) -> None:
    for percent in (50, 99):
        trips[f"{name} p{percent}"].append(percentile(seconds, percent) * 1e6)


def _add_pool_trips(trips: Samples, pool: Pool, prompts: Sequence[str]) -> None:
    outputs: list[Output] = []
    _add_trips(trips, "pool", _time_each(lambda prompt: outputs.append(pool.generate(prompt, PARAMS)), prompts))
    stages = [_stages(output) for output in outputs]
    for name in stages[0]:
        _add_trips(trips, name, [stage[name] for stage in stages])


def _stages(output: Output) -> dict[str, float]:
    """Seconds of each part of one item's way."""
    times = output.timings
    stamps = (times.submitted, times.received, times.leased, times.arrived, times.finished, times.delivered)
    submitted, received, leased, arrived, finished, delivered = (stamp or 0.0 for stamp in stamps)
    return {
        "pool, added hop": (arrived - submitted) + (delivered - finished),
        "pool, client → dispatcher": received - submitted,
        "pool, in the dispatcher": leased - received,
        "pool, dispatcher → worker": arrived - leased,
        "pool, in the worker": finished - arrived,
        "pool, worker → client": delivered - finished,
    }


def _raw_name(workers: int, items: int) -> str:
    return f"raw loop, {workers} worker{'s' * (workers > 1)}, {items} a message"


def _print_trips(trips: Samples) -> None:
    raw = median(trips["raw loop p50"])
    rows = []
    for name in (key.removesuffix(" p50") for key in trips if key.endswith(" p50")):
        p50, p99 = median(trips[f"{name} p50"]), median(trips[f"{name} p99"])
        verdict = at_most(p50 / raw, 1.5, " × raw") if name == "pool" else ""
        rows.append([name, f"{p50:,.0f}", f"{p99:,.0f}", spread(trips[f"{name} p50"]), f"{p50 / raw:.2f}", verdict])
    print_table(["round trip, one item at a time", "p50 µs", "p99 µs", "p50 of the rounds", "× raw p50", "target"], rows)


def _print_rates(rates: Samples, workers: int) -> None:
    pool = median(rates["pool"])
    sliced = max((_raw_name(workers, SLICE) for workers in (1, 2)), key=lambda name: median(rates[name]))
    targets = {sliced: 0.6, "ProcessPoolExecutor": 1.5}
    rows = []
    for name, samples in rates.items():
        ratio = pool / median(samples)
        verdict = at_least(ratio, targets[name], " ×") if name in targets else ""
        label = name if name.startswith("raw") else f"{name}, {workers} workers"
        rows.append([label, f"{median(samples):,.0f}", spread(samples), f"{ratio:.2f}", verdict])
    print_table(["many items at once", "items/s", "rounds", "pool ÷ this", "target"], rows)


if __name__ == "__main__":
    main()

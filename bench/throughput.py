"""Tokens a second of 96 prompts of mixed length: one `LLM`, two raw engines with a perfect split, and the pool.

    python bench/throughput.py [--quick]

| row | what runs                                                                                                    |
| --- | ------------------------------------------------------------------------------------------------------------ |
| a   | one `LLM`, vLLM's defaults, `generate` in static batches of 32                                               |
| b   | another such `LLM`, all prompts at once                                                                      |
| c   | raw in-process engines, one a worker, with the pool's cores, threads and KV bytes; split by tokens beforehand |
| d   | the pool, continuous                                                                                         |
| e   | the pool, static batches of 32                                                                               |
| f   | the pool with one worker, which has all cores, continuous                                                    |

Output lengths are exponential (mean 50, clipped to 4–200), set by `max_tokens` with `ignore_eos`; greedy; every engine has
max_num_seqs 32, max_model_len 1024, enforce_eager. Row c knows all lengths and divides them longest first (LPT), so no
scheduler can share the work better; each engine gets its whole share at once, in input order, and all start at one moment.
Rows a and b leave everything else to vLLM, except that their KV memory is what the pool's workers have together: vLLM's
default is 0.92 of the NUMA node, and it refuses to start beside anything else. KV memory is resident from the start, so it is
kept to what 32 of these sequences can fill (`--kv-mib` a worker). Every round has prompts that no prefix
cache has seen, the same for all rows. Engines stay loaded and the rows run in turns, a b c d e f a b …, one at a time; with
`--reload` each row is loaded, warmed up and ended in every round (for machines with less memory). The first round warms up
and is discarded. Tokens/s are generated tokens ÷ wall time of the round; the idle tail is the time between the first and
the last worker's end.

Targets: d ≥ 0.98 × c, d ≥ 1.6 × a.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
from child import Child
from conditions import GIB, print_conditions
from figures import at_least, median, print_table, spread
from messages import Job, Ran
from mixed_work import Work, make_work, split_evenly
from pool_plan import ENGINE_ARGS, environment, inproc_args, plans, resolve_model

from enginepool import Pool
from enginepool.clock import monotonic

START_DELAY_S = 0.1
ROWS = {
    "a": "one LLM, static batches",
    "b": "one LLM, all at once",
    "c": "raw engines, perfect split",
    "d": "pool, continuous",
    "e": "pool, static batches",
    "f": "pool of one worker with all cores",
}


class Round(msgspec.Struct, frozen=True):
    """One run of the work: wall seconds, tokens, and how long the first worker to end waited for the last."""

    wall_s: float
    num_tokens: int
    tail_s: float | None = None

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return self.num_tokens / self.wall_s


class Engines(Protocol):
    """Loaded engines that can run the work."""

    def run(self, work: Work, batch_size: int | None) -> Round:
        """Run the work once; `batch_size` is for engines that are not told at their start."""


class RawEngines:
    """`LLM`s in processes of their own, each with its part of the work decided beforehand."""

    def __init__(self, children: Sequence[Child], llm_args: Sequence[Mapping[str, object]]) -> None:
        self._children = children
        for child, args in zip(children, llm_args, strict=True):
            child.connection.send(args)
        for child in children:
            child.answer()

    def run(self, work: Work, batch_size: int | None) -> Round:
        """Start all at one moment, wait for the last."""
        parts = [work.part(indexes) for indexes in split_evenly(work.num_tokens, len(self._children))]
        if len(parts) == 1:
            parts = [work]
        start_at = monotonic() + START_DELAY_S
        for child, part in zip(self._children, parts, strict=True):
            child.connection.send(Job(part, start_at, batch_size))
        runs: list[Ran] = [child.answer() for child in self._children]
        ends = [run.ended for run in runs]
        return Round(max(ends) - start_at, sum(run.num_tokens for run in runs), max(ends) - min(ends))


class PoolEngines:
    """A pool, as its users call it."""

    def __init__(self, pool: Pool, workers: int) -> None:
        self._pool = pool
        self._workers = workers

    def run(self, work: Work, batch_size: int | None) -> Round:
        """One `generate_many`; the tail is taken from the outputs' own stamps."""
        started = monotonic()
        outputs = self._pool.generate_many(work.prompts, work.params(), on_error="raise")
        wall_s = monotonic() - started
        # A worker that got nothing was idle from the beginning.
        ends: dict[int | None, float] = dict.fromkeys(range(self._workers), min(output.timings.submitted or 0.0 for output in outputs))
        for output in outputs:
            ends[output.worker] = max(ends[output.worker], output.timings.finished or 0.0)
        tokens = sum(output.usage.completion_tokens for output in outputs)
        return Round(wall_s, tokens, max(ends.values()) - min(ends.values()))


def main() -> None:
    """Run the rows in turns and print the table."""
    args = _parse()
    args.model = resolve_model(args.model)
    shown = argparse.Namespace(**{**vars(args), "model": Path(args.model).name, **ENGINE_ARGS})
    print_conditions("throughput: mixed lengths", shown, has_vllm=True)
    work = make_work(args.prompts, 0)
    print(f"{len(work.prompts)} prompts, {work.total_tokens} tokens to generate a round\n", flush=True)
    rounds: dict[str, list[Round]] = {row: [] for row in args.rows}
    for row, result in _reloading(args) if args.reload else _alternating(args):
        rounds[row].append(result)
    _print(rounds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare tokens/s of one LLM, two raw engines and the pool.")
    parser.add_argument("--model", help="model folder (default: the embedded model)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="size of the static batches in a and e")
    parser.add_argument("--kv-mib", type=int, default=512, help="KV cache of each worker in MiB (a and b: of all workers together)")
    parser.add_argument("--rows", default="abcdef", help="which rows to run (default abcdef)")
    parser.add_argument("--prompts", type=int, help="prompts a round (default 96, quick 16)")
    parser.add_argument("--rounds", type=int, help="rounds that count (default 5, quick 1)")
    parser.add_argument("--reload", action="store_true", help="load each row's engines anew in every round")
    parser.add_argument("--quick", action="store_true", help="a short sanity run; its figures mean little")
    args = parser.parse_args()
    args.prompts = args.prompts or (16 if args.quick else 96)
    args.rounds = args.rounds or (1 if args.quick else 5)
    return args


def _alternating(args: argparse.Namespace) -> Iterator[tuple[str, Round]]:
    with ExitStack() as stack:
        loaded: dict[str, Engines] = {}
        for row in args.rows:
            loaded[row] = _load(row, args, stack)
            print(f"loaded {row}: {ROWS[row]}; {psutil.virtual_memory().available / GIB:.1f} GiB of memory left", flush=True)
        for number in range(args.rounds + 1):
            for row in args.rows:
                result = _run(loaded[row], row, args, number)
                if number:
                    yield row, result


def _reloading(args: argparse.Namespace) -> Iterator[tuple[str, Round]]:
    for number in range(1, args.rounds + 1):
        for row in args.rows:
            with ExitStack() as stack:
                engines = _load(row, args, stack)
                _run(engines, row, args, 0)
                yield row, _run(engines, row, args, number)


def _run(engines: Engines, row: str, args: argparse.Namespace, number: int) -> Round:
    work = make_work(args.prompts, number)
    result = engines.run(work, args.batch_size if row == "a" else None)
    if result.num_tokens != work.total_tokens:
        raise SystemExit(f"row {row} made {result.num_tokens} tokens, not {work.total_tokens}; the rows can not be compared")
    print(f"round {number or 'warm-up'}, {row}: {result.rate:.0f} tokens/s", flush=True)
    return result


def _load(row: str, args: argparse.Namespace, stack: ExitStack) -> Engines:
    kv_bytes = args.workers * args.kv_mib << 20
    pinned = plans(args.workers, kv_cache_bytes=kv_bytes)
    if row in "ab":
        child = stack.enter_context(Child("raw_engine.py"))
        return RawEngines([child], [{"model": args.model, "kv_cache_memory_bytes": kv_bytes, **ENGINE_ARGS}])
    if row == "c":
        children = [stack.enter_context(Child("raw_engine.py", env=environment(plan), cpus=plan.cpus)) for plan in pinned]
        return RawEngines(children, [inproc_args(args.model, plan) for plan in pinned])
    batch_size = args.batch_size if row == "e" else None
    workers = 1 if row == "f" else args.workers
    pool = Pool(args.model, workers=workers, batch_size=batch_size, kv_cache_budget_bytes=kv_bytes, **ENGINE_ARGS)
    return PoolEngines(stack.enter_context(pool), workers)


def _print(rounds: Mapping[str, Sequence[Round]]) -> None:
    rates = {row: median([one.rate for one in results]) for row, results in rounds.items()}
    rows = []
    for row, results in rounds.items():
        tails = [one.tail_s for one in results if one.tail_s is not None]
        tail = f"{median(tails):.2f}" if row in "cde" else "-"
        versus = [f"{rates[row] / rates[other]:.2f}" if other in rates else "-" for other in "ac"]
        walls = f"{median([one.wall_s for one in results]):.1f}"
        rates_spread = spread([one.rate for one in results])
        rows.append([f"{row}: {ROWS[row]}", f"{rates[row]:.0f}", rates_spread, walls, tail, *versus, _verdict(row, rates)])
    print()
    print_table(["what", "tokens/s", "rounds", "wall s", "idle tail s", "÷ a", "÷ c", "target"], rows)


def _verdict(row: str, rates: Mapping[str, float]) -> str:
    targets = {"c": 0.98, "a": 1.6} if row == "d" else {}
    return ", ".join(at_least(rates["d"] / rates[other], limit, f" × {other}") for other, limit in targets.items() if other in rates)


if __name__ == "__main__":
    main()

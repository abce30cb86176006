"""How far the reported stamps are from the truth: ours, and those anchored on vLLM's `arrival_time`.

    python bench/timings.py [--quick]

A `VllmEngine`, as a worker has it, gets 64 prompts at once, once with vLLM's engine core in its process and once with the
core in a process of its own. Both methods start from the same monotonic stamps of vLLM's `RequestStateStats`:

- ours: the paired anchor, wall = anchor.wall + (x_ts − anchor.monotonic);
- arrival-anchored: wall = arrival_time + (x_ts − queued_ts).

The truth is taken with `time.time()` in the process where vLLM's scheduler runs, right where each milestone happens
(`core_tap.py`): as `add_request` returns (queued), as `schedule` is entered (scheduled), as `update_from_output` returns
(first and last token). `finished` is compared with the end of the `llm_engine.step()` that returned the final output. The
error is the distance between reported and independent stamp, so it includes what the call itself took; it is an upper bound.

A second, coarser check needs nothing inside vLLM: wall-clock stamps around every `llm_engine.step()`. With the core in process
a first or last token must have been stamped between the beginning and the end of the step that returned it; with the core in
a process of its own, at least not after that end (outputs wait in a queue while prompts are being added, so there is no early
limit). The table counts stamps outside.

Target: ours ≤ 2 ms (every stamp, the largest error).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import core_tap
import msgspec
from child import Child
from conditions import print_conditions
from figures import at_most, median, percentile, print_table
from messages import Seen
from mixed_work import make_work
from pool_plan import ENGINE_ARGS, environment, plans, resolve_model

from enginepool.handover import EngineSpec

LIMIT_MS = 2.0
KV_BYTES = 1 << 30


class Errors(msgspec.Struct, frozen=True):
    """Errors of one milestone in one round, in milliseconds."""

    ours: list[float]
    by_arrival: list[float]


Rounds = list[dict[str, Errors]]


def main() -> None:
    """Measure both engine-core modes and print one table each."""
    args = _parse()
    args.model = resolve_model(args.model)
    shown = argparse.Namespace(**{**vars(args), "model": Path(args.model).name, **ENGINE_ARGS})
    print_conditions("timings: error of the reported stamps", shown, has_vllm=True)
    for mode in args.modes:
        rounds, outside = _measure(args, mode)
        print(f"engine core {'in process' if mode == 'inproc' else 'in its own process'}\n")
        _print(rounds)
        print(f"token stamps outside the step that returned them: {outside}\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare reported stamps with independent ones.")
    parser.add_argument("--model", help="model folder (default: the embedded model)")
    parser.add_argument("--modes", nargs="+", choices=("inproc", "mp"), default=["inproc", "mp"])
    parser.add_argument("--prompts", type=int, default=64, help="prompts submitted at once")
    parser.add_argument("--rounds", type=int, help="rounds that count (default 5, quick 1)")
    parser.add_argument("--quick", action="store_true", help="a short sanity run")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    return args


def _measure(args: argparse.Namespace, mode: str) -> tuple[Rounds, int]:
    (plan,) = plans(1, "inproc" if mode == "inproc" else "mp", KV_BYTES)
    name = Path(args.model).name
    spec = EngineSpec(kind="vllm", model=args.model, name=name, args=ENGINE_ARGS, engine_core=mode, kv_cache_bytes=plan.kv_cache_bytes)
    rounds: Rounds = []
    outside = 0
    with tempfile.TemporaryDirectory(prefix="bench-timings-") as folder:
        tap = Path(folder) / "tap"
        env = environment(plan) | {core_tap.PATH_VARIABLE: str(tap)}
        with Child("timed_engine.py", env=env, cpus=plan.cpus) as child:
            child.ask(spec)
            for number in range(args.rounds + 1):
                seen: list[Seen] = child.ask(make_work(args.prompts, number))
                if number:  # the first round warms up
                    rounds.append(_errors(seen, core_tap.read(tap)))
                    outside += sum(_count_outside(item, has_start=mode == "inproc") for item in seen)
    return rounds, outside


def _errors(seen: Sequence[Seen], truth: dict[str, dict[int, float]]) -> dict[str, Errors]:
    errors = {
        name: Errors(
            [1000 * abs(item.ours[name] - truth[name][item.lease]) for item in seen],
            [1000 * abs(item.by_arrival[name] - truth[name][item.lease]) for item in seen],
        )
        for name in core_tap.MILESTONES
    }
    return errors | {"finished": Errors([1000 * abs(item.ours["finished"] - item.last_step.after) for item in seen], [])}


def _count_outside(item: Seen, *, has_start: bool) -> int:
    pairs = (("first_token", item.first_step), ("last_token", item.last_step))
    return sum(item.ours[name] > step.after or (has_start and item.ours[name] < step.before) for name, step in pairs)


def _print(rounds: Rounds) -> None:
    rows = []
    for name in rounds[0]:
        worst = max(max(one[name].ours) for one in rounds)
        ours, by_arrival = ([getattr(one[name], method) for one in rounds] for method in ("ours", "by_arrival"))
        rows.append([name, *_figures(ours), *_figures(by_arrival), f"{worst:.2f}", at_most(worst, LIMIT_MS, " ms")])
    headers = ["stamp", "ours p50 ms", "ours max ms", "arrival p50 ms", "arrival max ms", "ours max of all rounds ms", "target"]
    print_table(headers, rows)


def _figures(rounds: Iterable[Sequence[float]]) -> list[str]:
    """The median over the rounds of each round's p50 and maximum."""
    kept = [errors for errors in rounds if errors]
    if not kept:
        return ["-", "-"]
    return [f"{median([percentile(errors, 50) for errors in kept]):.2f}", f"{median([max(errors) for errors in kept]):.2f}"]


if __name__ == "__main__":
    main()

"""How fast a pool starts and how little its dispatcher needs.

    python bench/startup.py [--quick]

- Engines: `Pool(…)` with two workers until it is ready (each has generated a token), ÷ one bare `LLM` with its core in process
  from exec to its first token (`raw_engine.py`), both eager. The bare one gets the environment of the pool's first worker; its
  mask is left alone, so it may load with all cores (`--pin-bare` gives it the first worker's cores too). In turns, after a
  warm-up of each that fills the page cache. Once with a small KV cache a worker and once with the share the pool takes by
  default: vLLM touches every page of its KV cache while it starts, and on a virtual machine several engines that do so at
  once slow each other down, which has nothing to do with how they are started.
- Import and `--help`: wall time of a fresh interpreter, in turns, from fork to exit; for the import the bare interpreter's
  time is subtracted.
- Dispatcher: resident memory by its own `status`, with echo workers: idle, and while it has passed on 200,000 items. "Flat"
  means that the second half of the items added at most 2 MB.

Targets: pool ≤ 1.3 × bare LLM; import ≤ 120 ms; help ≤ 300 ms; dispatcher ≤ 60 MB idle, and flat.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from child import Child
from conditions import print_conditions
from echo_work import PARAMS, make_prompts
from figures import at_most, median, print_table, spread
from pool_plan import ENGINE_ARGS, environment, inproc_args, plans, resolve_model

from enginepool import Pool

MEGABYTE = 1_000_000
FLAT_MEGABYTES = 2
CHUNK_ITEMS = 10_000
INTERPRETERS = {
    "bare interpreter": ["-c", "pass"],
    "import enginepool": ["-c", "import enginepool"],
    "from enginepool import Pool": ["-c", "from enginepool import Pool"],
    "python -m enginepool --help": ["-m", "enginepool", "--help"],
}

Row = list[str]


def main() -> None:
    """Measure the parts and print one table each."""
    args = _parse()
    has_engines = "engines" in args.parts
    args.model = resolve_model(args.model) if has_engines else None
    shown = {**vars(args), "model": args.model and Path(args.model).name, **ENGINE_ARGS}
    print_conditions("start-up and weight", argparse.Namespace(**shown), has_vllm=has_engines)
    if "interpreters" in args.parts:
        _interpreters(args.runs)
    if "dispatcher" in args.parts:
        _dispatcher(args.workers, args.items)
    if has_engines:
        _engines(args)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure start-up times and the dispatcher's memory.")
    names = ("interpreters", "dispatcher", "engines")
    parser.add_argument("--parts", nargs="+", choices=names, default=list(names))
    parser.add_argument("--model", help="model folder (default: the embedded model)")
    parser.add_argument("--workers", type=int, default=2)
    kv_help = "KV cache of each engine in MiB; 0 for the pool's default share"
    parser.add_argument("--kv-mib", type=int, nargs="+", default=[512, 0], help=kv_help)
    parser.add_argument("--pin-bare", action="store_true", help="give the bare LLM only the first worker's cores")
    parser.add_argument("--rounds", type=int, help="engine starts of each kind that count (default 3, quick 1)")
    parser.add_argument("--runs", type=int, help="starts of each interpreter (default 10, quick 3)")
    parser.add_argument("--items", type=int, help="echo items through the dispatcher (default 200000, quick 20000)")
    parser.add_argument("--quick", action="store_true", help="a short sanity run without engine warm-up; its figures mean little")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.runs = args.runs or (3 if args.quick else 10)
    args.items = args.items or (20_000 if args.quick else 200_000)
    return args


def _interpreters(runs: int) -> None:
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(runs + 1):
        for name, arguments in INTERPRETERS.items():
            started = perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if number:  # the first run writes byte code and warms the page cache
                samples[name].append((perf_counter() - started) * 1000)
    bare = median(samples["bare interpreter"])
    rows = []
    for name, values in samples.items():
        middle = median(values)
        limits = {"import enginepool": at_most(middle - bare, 120, " ms"), "python -m enginepool --help": at_most(middle, 300, " ms")}
        rows.append([name, f"{middle:.0f}", spread(values), f"{middle - bare:.0f}", limits.get(name, "")])
    print_table(["fresh interpreter", "ms", "rounds", "ms beyond bare", "target"], rows)


def _dispatcher(workers: int, items: int) -> None:
    prompts = make_prompts(min(items, CHUNK_ITEMS))
    marks = [items * quarter // 4 for quarter in (1, 2, 3, 4)]
    sizes: list[int] = []
    with Pool(engine="echo", workers=workers) as pool:
        idle = pool.status().rss_bytes
        done = 0
        for mark in marks:
            while done < mark:
                part = prompts[: mark - done]
                pool.generate_many(part, PARAMS, on_error="raise")
                done += len(part)
            sizes.append(pool.status().rss_bytes)
    rows = [["idle", _megabytes(idle), "", at_most(idle / MEGABYTE, 60, " MB")]]
    rows += [[f"after {mark:,} items", _megabytes(size), _megabytes(size - idle), ""] for mark, size in zip(marks, sizes, strict=True)]
    growth = (sizes[3] - sizes[1]) / MEGABYTE
    rows[-1][-1] = f"second half adds {growth:.1f} MB, {at_most(growth, FLAT_MEGABYTES, ' MB')}"
    print_table(["dispatcher", "resident MB", "MB beyond idle", "target"], rows)


def _engines(args: argparse.Namespace) -> None:
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(0 if not args.quick else 1, args.rounds + 1):
        for kv_mib in args.kv_mib:
            budget = args.workers * kv_mib << 20 if kv_mib else None
            kv = f"{kv_mib} MiB" if kv_mib else "default share"
            for name, start in (("bare LLM", _start_bare), (f"pool, {args.workers} workers", _start_pool)):
                seconds = start(args, budget)
                if number:
                    samples[kv, name].append(seconds)
                print(f"round {number or 'warm-up'}, KV {kv}, {name}: {seconds:.1f} s", flush=True)
    print()
    print_table(["ready, each with one token generated", "KV cache each", "s", "rounds", "÷ bare", "target"], _engine_rows(samples))


def _engine_rows(samples: dict[tuple[str, str], list[float]]) -> list[Row]:
    rows = []
    for (kv, name), values in samples.items():
        ratio = median(values) / median(samples[kv, "bare LLM"])
        verdict = at_most(ratio, 1.3, " × bare") if name.startswith("pool") else ""
        rows.append([name, kv, f"{median(values):.1f}", spread(values, 1), f"{ratio:.2f}", verdict])
    return rows


def _start_bare(args: argparse.Namespace, budget: int | None) -> float:
    plan = plans(args.workers, kv_cache_bytes=budget)[0]
    cpus: Sequence[int] | None = plan.cpus if args.pin_bare else None
    started = perf_counter()
    with Child("raw_engine.py", env=environment(plan), cpus=cpus) as child:
        child.ask(inproc_args(args.model, plan))
        return perf_counter() - started


def _start_pool(args: argparse.Namespace, budget: int | None) -> float:
    started = perf_counter()
    with Pool(args.model, workers=args.workers, kv_cache_budget_bytes=budget, **ENGINE_ARGS):
        return perf_counter() - started


def _megabytes(count: int) -> str:
    return f"{count / MEGABYTE:.1f}"


if __name__ == "__main__":
    main()

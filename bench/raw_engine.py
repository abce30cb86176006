"""One `vllm.LLM` in a process of its own, without enginepool: `raw_engine.py FD`, started by `Child`.

The first message is the LLM's arguments; the answer "ready" comes after one generated token. Each further message is a
`Job`, answered by a `Ran`.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from messages import Job, Ran

from enginepool import lifeline
from enginepool.clock import monotonic

if __name__ == "__mp_main__":  # an engine core that vLLM has spawned must not outlive us
    lifeline.arm()


def main() -> None:
    """Serve until the parent is gone."""
    lifeline.arm()
    from vllm import LLM, SamplingParams

    control = Connection(int(sys.argv[1]))
    llm = LLM(**control.recv())
    llm.generate(["x"], SamplingParams(max_tokens=1), use_tqdm=False)
    control.send("ready")
    while True:
        job: Job = control.recv()
        params = [SamplingParams(**fields) for fields in job.work.params()]
        time.sleep(max(0.0, job.start_at - monotonic()))
        control.send(_run(llm, job, params))


def _run(llm: Any, job: Job, params: list[Any]) -> Ran:
    if job.batch_size is None:
        num_tokens = _feed(llm, job.work.prompts, params)
    else:
        num_tokens = 0
        for start in range(0, len(params), job.batch_size):
            part = slice(start, start + job.batch_size)
            num_tokens += _count(llm.generate(job.work.prompts[part], params[part], use_tqdm=False))
    return Ran(monotonic(), num_tokens)


def _feed(llm: Any, prompts: list[str], params: list[Any]) -> int:
    llm.enqueue(prompts, params, use_tqdm=False)
    num_tokens = 0
    while llm.llm_engine.has_unfinished_requests():
        num_tokens += _count(llm.llm_engine.step())
    return num_tokens


def _count(outputs: list[Any]) -> int:
    return sum(len(sample.token_ids) for output in outputs if output.finished for sample in output.outputs)


if __name__ == "__main__":
    main()

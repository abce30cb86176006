"""One pool, many worker processes: each gets a handle of the pool by pickle and connects when it first asks.

Run it as it is; `engine="echo"` needs no vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from enginepool import Pool, SamplingParams

shared: Pool


def take(pool: Pool) -> None:
    """Keep the handle: one connection a worker process, not one a task."""
    global shared
    shared = pool


def ask(question: str) -> tuple[int, str, str | None]:
    """Runs in a worker process."""
    output = shared.generate(question, SamplingParams(max_tokens=8))
    return os.getpid(), shared.pool_id, output.text


def main() -> None:
    """Start a pool, let two worker processes ask it, and ask it once more when they have gone."""
    questions = [f"question {number}" for number in range(20)]
    with Pool(engine="echo", workers=1) as pool:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=take, initargs=(pool,)) as executor:
            answers = list(executor.map(ask, questions))
        print({text for _, _, text in answers}, "from the one pool:", {pool_id for _, pool_id, _ in answers} == {pool.pool_id})
        print("this process asked nothing itself:", os.getpid() not in {pid for pid, _, _ in answers})
        print("the pool runs on:", pool.generate("once more").ok)


if __name__ == "__main__":
    main()

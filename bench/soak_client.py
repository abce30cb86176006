"""A client in a process of its own, for the soak to kill, to stop and to interrupt.

    python bench/soak_client.py ENDPOINT NAME ITEMS

It runs one call of so many items, checks every text and exits with 0. Interrupted, it makes another call on the same pool and
checks that one; an answer that is not its own exits with 3.
"""

from __future__ import annotations

import sys
import warnings

from enginepool import Output, Pool, SamplingParams

TOKENS = 24


def main() -> int:
    """Run the calls; returns the exit code."""
    warnings.simplefilter("ignore")
    endpoint, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Pool.connect(endpoint) as pool:
        print("connected", flush=True)
        try:
            return 0 if _is_right(f"{name} first", count, pool) else 3
        except KeyboardInterrupt:
            return 0 if _is_right(f"{name} second", 20, pool) else 3


def _is_right(name: str, count: int, pool: Pool) -> bool:
    prompts = [f"{name} {index:05d};" for index in range(count)]
    outputs: list[Output] = pool.generate_many(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True), progress=False)
    if pool.status().model != "echo":
        return all(output.ok and len(output.token_ids) == TOKENS for output in outputs)
    return [output.text for output in outputs] == [(prompt * 3)[:TOKENS] for prompt in prompts]


if __name__ == "__main__":
    sys.exit(main())

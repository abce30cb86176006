"""A client in a process of its own, told what to do by its arguments: `python other_client.py ENDPOINT ROLE COUNT`.

It prints one line once everything is submitted, and at its end one JSON object with what it got. `hold` roles keep items
that never end, in each way of calling.
"""

from __future__ import annotations

import json
import sys
import threading

from enginepool import Pool, SamplingParams

LARGE_TOKENS = 16_000
ENDLESS = SamplingParams(max_tokens=10_000_000)


def prompt_of(number: int) -> str:
    """What item `number` asks."""
    return f"item {number:05d} "


def main(endpoint: str, role: str, count: int) -> None:
    """Play the role."""
    pool = Pool.connect(endpoint)
    if role == "large results":
        futures = [pool.submit(prompt_of(number), SamplingParams(max_tokens=LARGE_TOKENS)) for number in range(count)]
        print("submitted", flush=True)
        num_right = sum(future.result().text == (prompt_of(number) * 2000)[:LARGE_TOKENS] for number, future in enumerate(futures))
        print(json.dumps({"right": num_right}), flush=True)
    elif role == "many":
        print("submitting", flush=True)
        outputs = pool.generate_many([prompt_of(number) for number in range(count)], SamplingParams(max_tokens=10))
        print(json.dumps({"right": sum(output.text == prompt_of(number)[:10] for number, output in enumerate(outputs))}), flush=True)
    else:
        hold(pool, role, count)


def hold(pool: Pool, role: str, count: int) -> None:
    """Have `count` items in hand for ever."""
    if role == "submit":
        kept = [pool.submit(prompt_of(number), ENDLESS) for number in range(count)]
    elif role == "stream":
        streams = [pool.stream(prompt_of(number), ENDLESS) for number in range(count)]
        for stream in streams:
            next(stream)
    elif role == "iter_many":
        next(pool.iter_many((prompt_of(number) for number in range(count)), ENDLESS))
    elif role == "generate_many":
        pool.generate_many([prompt_of(number) for number in range(count)], ENDLESS)
    threading.Event().wait()
    del kept


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

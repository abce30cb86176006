"""What one line of a batch file costs in CPU time, part by part, without an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from enginepool.batch.answers import LineWriter
from enginepool.batch.index import digest_of, index_input
from enginepool.batch.ledger import RunLedger
from enginepool.batch.lines import InputFile
from enginepool.batch.outbox import Outbox, Ready
from enginepool.batch.request import read_request
from enginepool.batch.run import record_of
from enginepool.batch.target import Target
from enginepool.client.outputs import Output
from enginepool.clock import Timings
from enginepool.payload import Answer

LIMIT_BYTES = 32 << 20
AT_ONCE = 32
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle. " * 5
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Once upon a time " * 15}, "logprobs": None, "finish_reason": "length"}


class Cost(msgspec.Struct, frozen=True):
    """CPU microseconds a line of one part; `is_io` for reading and writing."""

    name: str
    us: float
    is_io: bool


def measure_costs(folder: Path, count: int) -> list[Cost]:
    """Measure each part on its own, on the calling thread."""
    path = folder / "cost.jsonl"
    message = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 50, "temperature": 0}
    with path.open("w") as file:
        for index in range(count):
            line = {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": message}
            file.write(json.dumps(line) + "\n")
    source = InputFile(path, LIMIT_BYTES)
    return [
        _cost("first pass: fingerprint and ids", count, lambda: index_input(source).digests.close()),
        _cost("read and check", count, lambda: _read(source)),
        _cost("make and write its result", count, lambda: _write(folder / "cost.out", count)),
        _cost("count it for report and progress", count, lambda: _count(count), is_io=False),
    ]


def _cost(name: str, count: int, act: Callable[[], None], *, is_io: bool = True) -> Cost:
    started = time.thread_time()
    act()
    return Cost(name, (time.thread_time() - started) / count * 1e6, is_io)


def _read(source: InputFile) -> None:
    for line in source:
        digest_of(line)
        read_request(line, LIMIT_BYTES)


def _write(path: Path, count: int) -> None:
    target, lines, output = Target(str(path)), LineWriter("bench", is_plain=False), _output()
    outbox = Outbox(target, None, is_ordered=False)
    for number in range(1, count + 1):
        outbox.put(number, Ready(lines.of_output(number, f"line-{number}", output), is_failed=False))
        if number % AT_ONCE == 0:
            outbox.flush()
    outbox.flush()
    target.close()


def _count(count: int) -> None:
    ledger, output = RunLedger(count, 1_796_000_000.0), _output()
    for _ in range(count):
        ledger.add(record_of(output))


def _output() -> Output:
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "m", "choices": [CHOICE], "usage": {}}
    stamps = {name: 1_796_000_000.0 + 0.125 * place for place, name in enumerate(Timings.__struct_fields__[:-1])}
    answer = Answer(json.dumps(body).encode(), 90, 50)
    timings = msgspec.convert(stamps | {"num_tokens": 50}, Timings)
    return Output(
        index=1, request_id="1", prompt=None, prompt_token_ids=None, outputs=[], timings=timings, worker=0, attempts=1, answer=answer
    )

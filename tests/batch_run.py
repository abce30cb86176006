"""Lines of a made-up batch run: several workers that answer a number of requests at once, some of which fail or are tried again."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from enginepool.batch.ledger import LineRecord, RunLedger
from enginepool.clock import Timings

STARTED = 1_780_000_000.0
STAMPS = ("submitted", "received", "leased", "arrived", "queued", "scheduled", "first_token", "last_token", "finished", "delivered")
BEFORE = (-1.0, -0.9, -0.8, -0.79, -0.75, -0.7, -0.5, -0.1, -0.05, 0.0)


def make_record(
    line: int = 1, *, end: float = 1.0, code: str | None = None, worker: int | None = 0, tokens: int = 10, **changes: object
) -> LineRecord:
    """One line that was answered within the second before `end`, which is in seconds since STARTED."""
    stamps = dict(zip(STAMPS, (STARTED + end + before for before in BEFORE), strict=True))
    timings = (
        Timings(**stamps, num_tokens=tokens)
        if worker is not None
        else Timings(submitted=stamps["submitted"], delivered=stamps["delivered"])
    )
    message = None if code is None else f"it was {code}"
    record = LineRecord(line, f"request-{line}", code is None, code, message, worker, 1, 20, tokens if code is None else 0, timings)
    return LineRecord(**{name: changes.get(name, getattr(record, name)) for name in record.__struct_fields__})  # type: ignore[arg-type]


def make_run(
    num_lines: int, num_workers: int = 2, slots: int = 16, seed: int = 1, failing: float = 0.015, token_s: float = 0.03
) -> Iterator[LineRecord]:
    """All lines in the order in which they end. A slot of a worker takes the next line as soon as it is free."""
    chance = random.Random(seed)
    free = [(STARTED + 0.4 + 0.05 * slot, worker, slot) for slot in range(slots) for worker in range(num_workers)]
    heapq.heapify(free)
    ended: list[tuple[float, int, LineRecord]] = []
    for line in range(1, num_lines + 1):
        leased, worker, slot = heapq.heappop(free)
        record = _answer(chance, line, worker, leased, failing, token_s)
        end = record.timings.delivered or leased
        heapq.heappush(free, (end, worker, slot))
        heapq.heappush(ended, (end, line, record))
        while ended and ended[0][0] <= free[0][0]:
            yield heapq.heappop(ended)[2]
    while ended:
        yield heapq.heappop(ended)[2]


def _answer(chance: random.Random, line: int, worker: int, leased: float, failing: float, token_s: float) -> LineRecord:
    tokens = min(400, 4 + int(chance.expovariate(1 / 60)))
    submitted = max(STARTED, leased - chance.uniform(0.2, 3.0))
    scheduled = leased + 0.02 + chance.expovariate(1 / 0.08)
    first = scheduled + 0.1 + chance.expovariate(1 / 0.15)
    last = first + tokens * token_s * chance.uniform(0.8, 1.25)
    prompt = chance.randint(20, 900)
    custom_id = f"request-{line}"
    if chance.random() < failing:
        code = chance.choice(["worker_lost", "invalid_request", "timeout", "invalid_request"])
        timings = Timings(submitted, submitted + 0.001, leased, delivered=first)
        return LineRecord(line, custom_id, False, code, f"line {line} ended as {code}", worker, 1 + (code == "worker_lost"), 0, 0, timings)
    stamps = (submitted, submitted + 0.001, leased, leased + 0.002, leased + 0.01, scheduled, first, last, last + 0.002, last + 0.004)
    return LineRecord(
        line, custom_id, True, None, None, worker, 1 + (chance.random() < 0.01), prompt, tokens, Timings(*stamps, num_tokens=tokens)
    )


def make_ledger(num_lines: int = 200, **changes: object) -> RunLedger:
    """The ledger of a whole made-up run."""
    ledger = RunLedger(num_lines, STARTED)
    for record in make_run(num_lines, **changes):  # type: ignore[arg-type]
        ledger.add(record)
    return ledger

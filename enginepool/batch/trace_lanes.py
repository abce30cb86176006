"""A batch run as Chrome trace events: one process a worker, one lane (thread) a request at a time.

::

    lane   |— queued —|— prefill —|———— decode ————|    (free)    |— queued —|…
         leased   scheduled   first_token      last_token

Lines come in the order in which they end, so a lane is only chosen when its request is over. Times are whole microseconds of Unix
time, so durations add up and events of one lane never overlap. Pure.
"""

from __future__ import annotations

from typing import Any

from enginepool.batch.lanes import Lanes
from enginepool.batch.ledger import UNKNOWN_CODE, LineRecord
from enginepool.trace_event import COLOURS, MIN_DURATION_US, Event

RUN_PID = 1_000_000  # no worker has such a number
COUNT_EVERY_US = 1_000_000
MAX_ID_CHARS = 200


class RunTrace:
    """Turns ended lines into events. It remembers one end a lane, and one count."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lanes] = {}
        self._counts = {"ok": 0, "failed": 0}
        self._counted_us = 0

    def names(self) -> list[Event]:
        """What the viewer calls the run itself."""
        return _process(RUN_PID, "run-batch", 0)

    def ended(self, record: LineRecord) -> list[Event]:
        """The phases of one line on its worker, or one instant where no worker had it."""
        timings = record.timings
        start = timings.leased or timings.arrived or timings.scheduled
        end = timings.finished or timings.delivered
        events = self._count(record, timings.delivered or end)
        if record.worker is None or start is None or end is None:
            moment = timings.delivered or timings.submitted
            return events if record.ok or moment is None else [*events, _instant(record, _to_us(moment))]
        return events + self._phases(record, record.worker, _to_us(start), _to_us(end))

    def _phases(self, record: LineRecord, worker: int, start_us: int, end_us: int) -> list[Event]:
        spans = _spans(record, start_us, end_us)
        lane, events = self._take_lane(worker, start_us, spans[-1][1] + spans[-1][2])
        args = _args(record)
        for name, ts, duration in spans:
            events.append(Event(name, "X", worker, ts, duration, lane, cname=COLOURS.get(name), args=args))
        if not record.ok:
            events[-1] = Event(spans[-1][0], "X", worker, spans[-1][1], spans[-1][2], lane, cname=COLOURS["lost"], args=args)
        return events

    def _take_lane(self, worker: int, start_us: int, end_us: int) -> tuple[int, list[Event]]:
        events: list[Event] = []
        lanes = self._lanes.get(worker)
        if lanes is None:
            lanes = self._lanes[worker] = Lanes()
            events += _process(worker, f"worker {worker}", worker + 1)
        lane, is_new = lanes.place(start_us, end_us)
        if is_new:
            events.append(Event("thread_name", "M", worker, tid=lane, args={"name": f"slot {lane}"}))
            events.append(Event("thread_sort_index", "M", worker, tid=lane, args={"sort_index": lane}))
        return lane, events

    def _count(self, record: LineRecord, at: float | None) -> list[Event]:
        """How many lines have ended, once a second."""
        self._counts["ok" if record.ok else "failed"] += 1
        if at is None or _to_us(at) < self._counted_us + COUNT_EVERY_US:
            return []
        self._counted_us = _to_us(at)
        return [Event("lines", "C", RUN_PID, self._counted_us, args=dict(self._counts))]


def _spans(record: LineRecord, start_us: int, end_us: int) -> list[tuple[str, int, int]]:
    """Each phase's name, start and duration. What was not reached is left out; a span to the end then tells why."""
    timings = record.timings
    reached = (("queued", timings.scheduled), ("prefill", timings.first_token), ("decode", timings.last_token))
    phases = [(name, _to_us(end)) for name, end in reached if end is not None]
    if not record.ok or not phases:
        phases.append((record.code or UNKNOWN_CODE if not record.ok else "run", end_us))
    spans = []
    for name, phase_end_us in phases:
        duration = max(MIN_DURATION_US, phase_end_us - start_us)
        spans.append((name, start_us, duration))
        start_us += duration
    return spans


def _args(record: LineRecord) -> dict[str, Any]:
    args: dict[str, Any] = {"line": record.line, "tokens": record.completion_tokens, "prompt_tokens": record.prompt_tokens}
    if record.custom_id is not None:
        args["custom_id"] = clean(record.custom_id[:MAX_ID_CHARS])
    args["attempts"] = record.attempts
    if not record.ok:
        args["code"] = record.code
    return args


def _instant(record: LineRecord, ts: int) -> Event:
    return Event(record.code or UNKNOWN_CODE, "i", RUN_PID, ts, tid=0, s="t", args=_args(record))


def _process(pid: int, name: str, order: int) -> list[Event]:
    return [
        Event("process_name", "M", pid, args={"name": name}),
        Event("process_sort_index", "M", pid, args={"sort_index": order}),
    ]


def clean(text: str) -> str:
    """Without lone surrogates, which no file can hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _to_us(seconds: float) -> int:
    return round(seconds * 1e6)

"""The trace of a pool as Chrome trace events: one process a worker, one lane (thread) a slot of it, one lane an attempt at a time.

::

    lane   |— queued —|— prefill —|———— decode ————|    (free)    |— queued —|…
         leased   scheduled   first_token      last_token       the next lease

Each attempt takes the lowest free lane of its worker when it is leased and gives it back when it ends. Times are whole
microseconds of Unix time, so durations add up and events of one lane never overlap. Pure: time is an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from enginepool.dispatcher.backlog import Item
from enginepool.errors import ItemError
from enginepool.trace_event import COLOURS, MIN_DURATION_US, Event

Milestones = tuple[float | None, float | None, float | None, int]
"""Monotonic `scheduled`, `first_token` and `last_token` as far as they were reached, and the number of tokens."""

PHASES = ("queued", "prefill", "decode")
NOTHING_REACHED: Milestones = (None, None, None, 0)


class Attempt:
    """One leased item and the lane it runs in."""

    __slots__ = ("args", "lane", "leased", "start_us")

    def __init__(self, lane: int, leased: float, start_us: int, args: dict[str, Any]) -> None:
        self.lane = lane
        self.leased = leased
        self.start_us = start_us
        self.args = args


class _Lanes:
    """The lanes of one worker: which are free, and until when each was last used."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.until_us: list[int] = []

    def take(self) -> tuple[int, bool]:
        """The lowest free lane, and whether it is a new one."""
        if self.free:
            return heapq.heappop(self.free), False
        self.until_us.append(0)
        return len(self.until_us) - 1, True

    def give_back(self, lane: int, until_us: int) -> None:
        self.until_us[lane] = until_us
        heapq.heappush(self.free, lane)


class TraceLanes:
    """Turns what happens to items and workers into events. `wall_offset_s` makes Unix time of the monotonic stamps."""

    def __init__(self, num_workers: int, wall_offset_s: float) -> None:
        self.dispatcher_pid = num_workers
        self._wall_offset_s = wall_offset_s
        self._lanes = [_Lanes() for _ in range(num_workers)]
        self._attempts: list[dict[int, Attempt]] = [{} for _ in range(num_workers)]

    def names(self) -> list[Event]:
        """What the viewer calls each process, in its order."""
        names = [f"worker {index}" for index in range(self.dispatcher_pid)] + ["dispatcher"]
        order = [*range(1, len(names)), 0]
        return [
            event
            for pid, name in enumerate(names)
            for event in (
                Event("process_name", "M", pid, args={"name": name}),
                Event("process_sort_index", "M", pid, args={"sort_index": order[pid]}),
            )
        ]

    def leased(self, worker: int, items: Iterable[Item], now: float) -> list[Event]:
        """Items were handed to a worker; returns the names of lanes that are new."""
        lanes, attempts = self._lanes[worker], self._attempts[worker]
        events: list[Event] = []
        for item in items:
            assert item.lease is not None
            lane, is_new = lanes.take()
            if is_new:
                events += [
                    Event("thread_name", "M", worker, tid=lane, args={"name": f"slot {lane}"}),
                    Event("thread_sort_index", "M", worker, tid=lane, args={"sort_index": lane}),
                ]
            start_us = max(self.to_us(now), lanes.until_us[lane])
            attempts[item.lease] = Attempt(lane, now, start_us, _describe(item, now))
        return events

    def ended(self, item: Item, error: ItemError | None, milestones: Milestones, now: float) -> list[Event]:
        """An item has ended: the phases of its last attempt, or one instant where it never had a lane."""
        worker, lease = item.last_worker, item.lease
        attempt = None if worker is None or lease is None else self._attempts[worker].pop(lease, None)
        if attempt is None or worker is None:
            return [] if error is None or item.lease is not None else [self._never_leased(item, error, now)]
        args = attempt.args | {"tokens": milestones[3]}
        if error is not None:
            args["error"] = error.code.value
        return self._close(worker, attempt, self._phases(attempt, error, milestones, now), args)

    def worker_died(self, worker: int, now: float) -> list[Event]:
        """Everything in the worker's hand is lost; what is tried again comes back with a new lease."""
        attempts, self._attempts[worker] = self._attempts[worker], {}
        end_us = self.to_us(now)
        return [event for attempt in attempts.values() for event in self._close(worker, attempt, [("lost", end_us)], attempt.args)]

    def worker_note(self, worker: int, text: str, now: float, **args: Any) -> Event:
        """An instant of a worker: started, ready, its exit."""
        return Event(text, "i", worker, self.to_us(now), tid=0, s="p", args=args or None)

    def counters(self, backlog: int, in_flight: int, now: float) -> list[Event]:
        """How many items wait and run now."""
        ts = self.to_us(now)
        counts = {"backlog": backlog, "in flight": in_flight}
        return [Event(name, "C", self.dispatcher_pid, ts, args={"items": count}) for name, count in counts.items()]

    def to_us(self, monotonic_s: float) -> int:
        """Microseconds of Unix time."""
        return round((monotonic_s + self._wall_offset_s) * 1e6)

    def _phases(self, attempt: Attempt, error: ItemError | None, milestones: Milestones, now: float) -> list[tuple[str, int]]:
        """Each phase's name and end. What was not reached is left out; a span to the end then tells why."""
        end_us = self.to_us(now)
        phases = [(name, self.to_us(end)) for name, end in zip(PHASES, milestones, strict=False) if end is not None]
        if error is not None or not phases:
            phases.append((error.code.value if error is not None else "run", end_us))
        return phases

    def _close(self, worker: int, attempt: Attempt, phases: list[tuple[str, int]], args: dict[str, Any]) -> list[Event]:
        start, events = attempt.start_us, []
        for name, end in phases:
            duration = max(MIN_DURATION_US, end - start)
            events.append(Event(name, "X", worker, start, duration, attempt.lane, cname=COLOURS.get(name), args=args))
            start += duration
        self._lanes[worker].give_back(attempt.lane, start)
        return events

    def _never_leased(self, item: Item, error: ItemError, now: float) -> Event:
        args = {"item": item.seq, "client": item.client.hex()[:8], "waited_s": round(now - item.received, 6)}
        return Event(error.code.value, "i", self.dispatcher_pid, self.to_us(now), tid=0, s="t", args=args)


def _describe(item: Item, now: float) -> dict[str, Any]:
    return {
        "item": item.seq,
        "lease": item.lease,
        "client": item.client.hex()[:8],
        "attempt": item.attempts,
        "waited_s": round(now - item.received, 6),
    }

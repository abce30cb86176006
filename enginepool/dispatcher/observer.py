"""The observer: tells those who measure what happens to items and workers, with the time at which it was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from enginepool.clock import ClockAnchor, decode_stamps, monotonic
from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.desk import Deliver
from enginepool.dispatcher.latency import LatencyWindow
from enginepool.dispatcher.trace import NOTHING_REACHED, Milestones, TraceLanes
from enginepool.errors import Code, ItemError
from enginepool.trace_file import TraceFile

COUNTERS_S = 1.0


class Observer:
    """Feeds the latency window, and the trace where there is one."""

    def __init__(self, num_workers: int, anchor: ClockAnchor, writer: TraceFile | None) -> None:
        self.latency = LatencyWindow()
        self._writer = writer
        self._lanes = TraceLanes(num_workers, anchor.wall_s - anchor.monotonic_s)
        self._num_workers = num_workers
        self._count_at = 0.0
        if writer is not None:
            writer.add(self._lanes.names())

    @property
    def on_leased(self) -> Callable[[int, Sequence[Item], float], None] | None:
        """Whom to tell that items were handed to a worker; None where nobody wants to know."""
        writer, lanes = self._writer, self._lanes
        return None if writer is None else lambda worker, items, now: writer.add(lanes.leased(worker, items, now))

    def before(self, deliver: Deliver) -> Deliver:
        """`deliver`, with each end noted before it. This runs once an item, so it does next to nothing for most."""
        count, is_tracing = self.latency.ended, self._writer is not None

        def note_and_deliver(item: Item, payload: bytes, error: ItemError | None, stamps: msgspec.Raw) -> None:
            now = monotonic()
            is_sampled = count(now, error is None, error is not None and error.code is not Code.ABORTED)
            if is_sampled or is_tracing:
                self._measure(item, error, stamps, now, is_sampled)
            deliver(item, payload, error, stamps)

        return note_and_deliver

    def worker_died(self, worker: int, how: str, pid: int | None) -> None:
        """A worker has exited; what it had in hand is lost."""
        if self._writer is not None:
            self.note(worker, how, pid)
            self._writer.add(self._lanes.worker_died(worker, monotonic()))

    def note(self, worker: int, text: str, pid: int | None) -> None:
        """A worker's state has changed."""
        if self._writer is not None:
            self._writer.add([self._lanes.worker_note(worker, text, monotonic(), pid=pid)])

    def tick(self, now: float, backlog: int, in_flight: int) -> None:
        """Write what has gathered; every second with the counts."""
        if self._writer is None:
            return
        if now >= self._count_at:
            self._count_at = now + COUNTERS_S
            self._writer.add(self._lanes.counters(backlog, in_flight, now))
        self._writer.flush()

    def close(self) -> None:
        """End the trace; what is still in a worker's hand is lost."""
        if self._writer is not None:
            for worker in range(self._num_workers):
                self._writer.add(self._lanes.worker_died(worker, monotonic()))
            self._writer.close()

    def _measure(self, item: Item, error: ItemError | None, stamps: msgspec.Raw, now: float, is_sampled: bool) -> None:
        """Decode the stamps, which happens only for those who want them."""
        milestones = _milestones(stamps)
        if is_sampled:
            received, first_token = item.received, milestones[1]
            ttft_s = None if first_token is None else first_token - received
            self.latency.sample((item.leased or received) - received, ttft_s, now - received)
        if self._writer is not None:
            self._writer.add(self._lanes.ended(item, error, milestones, now))


def _milestones(stamps: msgspec.Raw) -> Milestones:
    try:
        found = decode_stamps(stamps)
    except msgspec.DecodeError:  # only forwarded otherwise: whoever reads it there will tell
        return NOTHING_REACHED
    return NOTHING_REACHED if found is None else (found.scheduled, found.first_token, found.last_token, found.num_tokens)

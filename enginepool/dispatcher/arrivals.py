"""Arrivals: when the longest-waiting item came, for the timer of static batches. Pure.

A heap with one entry an item and lazy removal: an entry whose item waits no more is dropped when it comes to the top, or
when such entries are the majority, so each costs a logarithm once, however many queues the items stand in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

MIN_STALE = 256


class Received(Protocol):
    """What has come at some time (monotonic seconds)."""

    received: float


T = TypeVar("T", bound=Received)


class Arrivals(Generic[T]):
    """The items that `waits` holds for; it may answer no for now, and then they have to be added again."""

    def __init__(self, items: Iterable[T], waits: Callable[[T], bool]) -> None:
        self._waits = waits
        self._count = 0
        self._heap = [self._entry(item) for item in items]
        self._num_live = len(self._heap)
        heapq.heapify(self._heap)

    def add(self, item: T) -> None:
        """An item waits (again)."""
        heapq.heappush(self._heap, self._entry(item))
        if len(self._heap) > 2 * self._num_live + MIN_STALE:
            self._sweep()

    def oldest(self) -> float | None:
        """When the first of them came, or None."""
        while self._heap and not self._waits(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _entry(self, item: T) -> tuple[float, int, T]:
        self._count += 1
        return item.received, self._count, item

    def _sweep(self) -> None:
        """One entry an item that still waits: one that came back after a death may have two."""
        entries = {id(entry[2]): entry for entry in self._heap if self._waits(entry[2])}
        self._heap = list(entries.values())
        self._num_live = len(self._heap)
        heapq.heapify(self._heap)

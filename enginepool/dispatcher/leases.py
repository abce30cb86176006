"""Leases: which attempt of which item is in which worker's hand.

A lease number is never used twice, so an answer to an older attempt finds nothing. Pure: time is an argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from enginepool.dispatcher.backlog import Item
from enginepool.status import ItemState


class Leases:
    """All leases of one pool, by number and by worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._items: dict[int, Item] = {}
        self._by_worker: dict[int, dict[int, Item]] = {}
        self._sequences: dict[int, int] = {}
        self._alone: set[int] = set()

    def __len__(self) -> int:
        return len(self._items)

    def grant(self, items: Iterable[Item], worker: int, now: float, *, alone: bool = False) -> list[int]:
        """Hand items to a worker; returns the new lease numbers in the same order."""
        hand = self._by_worker.setdefault(worker, {})
        numbers: list[int] = []
        total = self._sequences.get(worker, 0)
        for item in items:
            number = next(self._numbers)
            item.state, item.lease, item.leased, item.last_worker = ItemState.LEASED, number, now, worker
            item.attempts += 1
            self._items[number] = hand[number] = item
            total += item.sequences
            numbers.append(number)
        self._sequences[worker] = total
        if alone:
            self._alone.add(worker)
        return numbers

    def finish(self, number: int, worker: int) -> Item | None:
        """Close a lease; None when this worker does not hold it (any more)."""
        hand = self._by_worker.get(worker)
        item = hand.pop(number, None) if hand else None
        if item is None or hand is None:
            return None
        del self._items[number]
        item.state = ItemState.FINISHED
        self._sequences[worker] -= item.sequences
        if not hand:
            self._alone.discard(worker)
        return item

    def find(self, number: int, worker: int) -> Item | None:
        """The item of an open lease of this worker."""
        return self._by_worker.get(worker, {}).get(number)

    def in_hand(self, worker: int) -> int:
        """How many items the worker holds."""
        return len(self._by_worker.get(worker, ()))

    def sequences(self, worker: int) -> int:
        """How many sequences those are (an item with n=4 counts 4)."""
        return self._sequences.get(worker, 0)

    def is_isolating(self, worker: int) -> bool:
        """Whether the worker runs suspects and must get nothing beside them."""
        return worker in self._alone

    def items_of(self, worker: int, numbers: Iterable[int] | None = None) -> list[Item]:
        """What the worker holds, all or these leases, in the order in which it was handed out."""
        hand = self._by_worker.get(worker, {})
        return list(hand.values()) if numbers is None else [hand[number] for number in numbers]

    def revoke(self, worker: int) -> list[Item]:
        """Close all leases of a worker that has died; returns the items in order."""
        items = self.items_of(worker)
        for item in items:
            if item.lease is not None:
                del self._items[item.lease]
        self._by_worker.pop(worker, None)
        self._sequences.pop(worker, None)
        self._alone.discard(worker)
        return items

"""The backlog: items that wait for a worker, in the order in which they will be handed out.

Order: priority (lower first, as in vLLM), then round-robin over clients, then arrival. Pure: time is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable

from enginepool.errors import ItemError
from enginepool.status import ItemState

ClientId = bytes
MIN_STALE = 256


class Item:
    """One accepted request and what has happened to it. Times are monotonic seconds."""

    __slots__ = (
        "abort_error",
        "admission_deaths",
        "attempts",
        "charged_in",
        "client",
        "deadline",
        "deaths",
        "died_in",
        "evidence",
        "fresh_deaths",
        "has_streamed",
        "is_told",
        "last_worker",
        "lease",
        "leased",
        "payload",
        "priority",
        "received",
        "seq",
        "sequences",
        "state",
    )

    def __init__(
        self,
        client: ClientId,
        seq: int,
        payload: bytes,
        received: float,
        priority: int = 0,
        deadline: float = math.inf,
        sequences: int = 1,
    ) -> None:
        self.client = client
        self.seq = seq
        self.payload = payload
        self.received = received
        self.priority = priority
        self.deadline = deadline
        self.sequences = sequences
        self.state = ItemState.QUEUED
        self.attempts = 0
        self.deaths = 0
        self.admission_deaths = 0
        self.fresh_deaths = 0
        self.evidence = 0
        self.died_in: list[int] = []
        self.charged_in: list[int] = []
        self.has_streamed = False
        self.is_told = False
        self.lease: int | None = None
        self.leased: float | None = None
        self.last_worker: int | None = None
        self.abort_error: ItemError | None = None


def _waits(item: Item) -> bool:
    return item.state is ItemState.QUEUED


class _Level:
    """One priority: a queue for each client, taken in turns."""

    def __init__(self) -> None:
        self.queues: OrderedDict[ClientId, deque[Item]] = OrderedDict()

    def queue_of(self, client: ClientId) -> deque[Item]:
        queue = self.queues.get(client)
        if queue is None:
            queue = self.queues[client] = deque()
        return queue

    def pop(self) -> Item | None:
        while self.queues:
            client, queue = next(iter(self.queues.items()))
            while queue:
                item = queue.popleft()
                if item.state is ItemState.QUEUED:
                    self._end_turn(client, queue)
                    return item
            del self.queues[client]
        return None

    def oldest(self) -> float | None:
        """Each queue is in order of arrival, so its first waiting item is its oldest."""
        firsts = [next((item.received for item in queue if _waits(item)), None) for queue in self.queues.values()]
        return min((first for first in firsts if first is not None), default=None)

    def _end_turn(self, client: ClientId, queue: deque[Item]) -> None:
        if queue:
            self.queues.move_to_end(client)
        else:
            del self.queues[client]


class Backlog:
    """Waiting items, bounded by count and payload bytes. Removed items are skipped when their turn comes."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_items = 0
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._trials: deque[list[Item]] = deque()
        self._deadlines: list[tuple[float, int, Item]] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return self._num_items

    def can_take(self, num_items: int, num_bytes: int) -> bool:
        """Whether that many more would stay within the bounds."""
        return self._num_items + num_items <= self.max_items and self.num_bytes + num_bytes <= self.max_bytes

    def push(self, item: Item) -> None:
        """Queue a new item."""
        self._level(item.priority).queue_of(item.client).append(item)
        if item.deadline != math.inf:
            heapq.heappush(self._deadlines, (item.deadline, id(item), item))
        self._count(item, 1)

    def push_back(self, items: Iterable[Item]) -> None:
        """Return items whose worker died to the front of their queues."""
        for item in reversed(list(items)):
            self._level(item.priority).queue_of(item.client).appendleft(item)
            self._wait_again(item)

    def push_trials(self, groups: Iterable[list[Item]]) -> None:
        """Return suspects whose worker died; each group will run in a worker of its own. Their groups come first."""
        for group in reversed(list(groups)):
            self._trials.appendleft(group)
            for item in group:
                self._wait_again(item)

    def pop(self) -> Item | None:
        """Take the next item, or None."""
        while self._order:
            item = self._levels[self._order[0]].pop()
            if item is not None:
                self._count(item, -1)
                return item
            del self._levels[self._order.pop(0)]
        return None

    def next_trial(self) -> list[Item]:
        """The group that runs next in a worker of its own, without what has ended meanwhile; empty when there is none."""
        while self._trials:
            group = self._trials[0] = [item for item in self._trials[0] if _waits(item)]
            if group:
                return group
            self._trials.popleft()
        return []

    def pop_trial(self) -> list[Item]:
        """Take that group."""
        group = self.next_trial()
        if group:
            self._trials.popleft()
        for item in group:
            self._count(item, -1)
        return group

    @property
    def num_shared(self) -> int:
        """How many wait that may run beside others."""
        return self._num_items - sum(_waits(item) for group in self._trials for item in group)

    def remove(self, item: Item) -> None:
        """Take a waiting item out (it was aborted or expired); its place in the queue is skipped later."""
        item.state = ItemState.FINISHED
        self._count(item, -1)

    def oldest_arrival(self) -> float | None:
        """When the longest-waiting item was received, or None when nothing waits."""
        heads = [level.oldest() for level in self._levels.values()]
        heads += [item.received for group in self._trials for item in group if _waits(item)]
        return min((head for head in heads if head is not None), default=None)

    def due(self, now: float) -> list[Item]:
        """Items, waiting or leased, whose deadline has passed; each is told once."""
        late: list[Item] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            item = heapq.heappop(self._deadlines)[2]
            if item.state is not ItemState.FINISHED:
                late.append(item)
        return late

    def forget_deadline(self, item: Item) -> None:
        """An item has ended; once most deadlines belong to such items, drop them, for a far deadline would keep them long."""
        if item.deadline == math.inf:
            return
        self._num_stale += 1
        if self._num_stale > MIN_STALE and self._num_stale * 2 > len(self._deadlines):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not ItemState.FINISHED]
            heapq.heapify(self._deadlines)
            self._num_stale = 0

    def next_deadline(self) -> float:
        """When `due` is worth calling again, or infinity."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            self._order.append(priority)
            self._order.sort()
        return level

    def _wait_again(self, item: Item) -> None:
        item.state, item.lease = ItemState.QUEUED, None
        self._count(item, 1)

    def _count(self, item: Item, sign: int) -> None:
        self._num_items += sign
        self.num_bytes += sign * len(item.payload)

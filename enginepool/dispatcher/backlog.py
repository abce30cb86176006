"""The backlog: items that wait for a worker, in the order in which they will be handed out.

Order: priority (lower first, as in vLLM), then round-robin over clients, then arrival. A paused client is left out until it
has taken what is ready for it. Pure: time is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from enginepool.dispatcher.arrivals import Arrivals
from enginepool.errors import ItemError
from enginepool.status import ItemState

ClientId = bytes
Key = TypeVar("Key")
MIN_STALE = 256
MAX_SHARE = 0.75


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

    def _end_turn(self, client: ClientId, queue: deque[Item]) -> None:
        if queue:
            self.queues.move_to_end(client)
        else:
            del self.queues[client]


class _Share:
    """What one client has waiting."""

    __slots__ = ("num_bytes", "num_items")

    def __init__(self) -> None:
        self.num_items = 0
        self.num_bytes = 0


class Backlog:
    """Waiting items, bounded by count and payload bytes. Removed items are skipped when their turn comes.

    A paused client keeps its place: its items wait apart, are not handed out and not counted by `num_shared`, until `resume`.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_items = 0
        self._shares: dict[ClientId, _Share] = {}
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._trials: deque[list[Item]] = deque()
        self._paused: dict[ClientId, dict[int, deque[Item]]] = {}
        self._num_paused = 0
        self._num_removed = 0
        self._arrivals: Arrivals[Item] | None = None
        self._deadlines: list[tuple[float, int, Item]] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return self._num_items

    def refusal(self, client: ClientId, num_items: int, num_bytes: int) -> str | None:
        """Why that many more can not be taken, or None. What a client adds to items that wait already leaves others a quarter."""
        if not self._fits(self._num_items + num_items, self.num_bytes + num_bytes, 1.0):
            limits = f"{self.max_items} items, {self.max_bytes} bytes"
            return f"the backlog is full ({self._num_items} items wait; limits: {limits}); try again later"
        share = self._shares.get(client)
        if share is not None and not self._fits(share.num_items + num_items, share.num_bytes + num_bytes, MAX_SHARE):
            limits = f"{MAX_SHARE:.0%} of {self.max_items} items, {self.max_bytes} bytes"
            return f"this client's share of the backlog is full ({share.num_items} of its items wait; limits: {limits}); try again later"
        return None

    def push(self, item: Item) -> None:
        """Append an accepted item."""
        self._queue_of(item).append(item)
        self._begin_wait(item)
        if item.deadline != math.inf:
            heapq.heappush(self._deadlines, (item.deadline, id(item), item))

    def push_back(self, items: Iterable[Item]) -> None:
        """Return items whose worker died to the front of their queues."""
        for item in reversed(list(items)):
            self._queue_of(item).appendleft(item)
            self._wait_again(item)

    def push_trials(self, groups: Iterable[list[Item]]) -> None:
        """Return suspects whose worker died; each group will run in a worker of its own. Their groups come first."""
        for group in reversed(list(groups)):
            self._trials.appendleft(group)
            for item in group:
                self._wait_again(item, on_trial=True)

    def pop(self) -> Item | None:
        """Take the next item, or None."""
        while self._order:
            item = self._levels[self._order[0]].pop()
            if item is not None:
                self._end_wait(item)
                return item
            del self._levels[heapq.heappop(self._order)]
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
            self._end_wait(item)
        return group

    @property
    def num_shared(self) -> int:
        """How many wait that may be handed out now and run beside others."""
        return self._num_items - self._num_paused - sum(map(_waits, self._suspects()))

    def pause(self, client: ClientId) -> None:
        """Hand out no more items of this client; what waits for a trial was handed out before and is let be."""
        if client not in self._paused:
            queues = {priority: level.queues.pop(client) for priority, level in self._levels.items() if client in level.queues}
            self._paused[client] = queues
            self._num_paused += _count_waiting(queues.values())
            self._arrivals = None

    def resume(self, client: ClientId) -> None:
        """Hand its items out again; its turn comes after the others'."""
        queues = self._paused.pop(client, None)
        if queues is not None:
            self._num_paused -= _count_waiting(queues.values())
            for priority, queue in queues.items():
                self._level(priority).queues[client] = queue
            self._arrivals = None

    def remove(self, item: Item) -> None:
        """Take a waiting item out (it was aborted or expired); its place in the queue is skipped later."""
        if item.client in self._paused and not any(other is item for other in self._suspects()):
            self._num_paused -= 1
        item.state = ItemState.FINISHED
        self._end_wait(item)
        self._num_removed += 1
        if self._num_removed > MIN_STALE and self._num_removed > self._num_items:
            self._sweep()

    def oldest_arrival(self) -> float | None:
        """When the longest-waiting item that may be handed out was received, or None. Only who asks pays for it."""
        if self._arrivals is None:
            shared = (item for level in self._levels.values() for queue in level.queues.values() for item in queue)
            self._arrivals = Arrivals(filter(self._may_go, chain(shared, self._suspects())), self._may_go)
        return self._arrivals.oldest()

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
            heapq.heappush(self._order, priority)
        return level

    def _queue_of(self, item: Item) -> deque[Item]:
        if self._paused and (mine := self._paused.get(item.client)) is not None:
            return mine.setdefault(item.priority, deque())
        level = self._levels.get(item.priority) or self._level(item.priority)
        return level.queues.get(item.client) or level.queue_of(item.client)

    def _may_go(self, item: Item) -> bool:
        return item.state is ItemState.QUEUED and item.client not in self._paused

    def _suspects(self) -> Iterator[Item]:
        return (item for group in self._trials for item in group)

    def _wait_again(self, item: Item, *, on_trial: bool = False) -> None:
        item.state, item.lease = ItemState.QUEUED, None
        self._begin_wait(item, on_trial=on_trial)

    def _begin_wait(self, item: Item, *, on_trial: bool = False) -> None:
        share = self._shares.get(item.client) or self._shares.setdefault(item.client, _Share())
        size = len(item.payload)
        self._num_items += 1
        self.num_bytes += size
        share.num_items += 1
        share.num_bytes += size
        if self._paused and item.client in self._paused:
            self._num_paused += not on_trial
        elif self._arrivals is not None:
            self._arrivals.add(item)

    def _end_wait(self, item: Item) -> None:
        share = self._shares[item.client]
        size = len(item.payload)
        self._num_items -= 1
        self.num_bytes -= size
        share.num_items -= 1
        share.num_bytes -= size
        if not share.num_items:
            del self._shares[item.client]

    def _fits(self, num_items: int, num_bytes: int, share: float) -> bool:
        return num_items <= share * self.max_items and num_bytes <= share * self.max_bytes

    def _sweep(self) -> None:
        """Forget removed items everywhere: behind busier levels their turn may never come."""
        self._num_removed = 0
        for level in self._levels.values():
            level.queues = OrderedDict(_swept(level.queues))
        self._levels = {priority: level for priority, level in self._levels.items() if level.queues}
        self._order = sorted(self._levels)
        self._paused = {client: dict(_swept(queues)) for client, queues in self._paused.items()}


def _swept(queues: Mapping[Key, deque[Item]]) -> Iterator[tuple[Key, deque[Item]]]:
    for key, queue in queues.items():
        waiting = deque(filter(_waits, queue))
        if waiting:
            yield key, waiting


def _count_waiting(queues: Iterable[deque[Item]]) -> int:
    return sum(_waits(item) for queue in queues for item in queue)

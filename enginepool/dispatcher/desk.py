"""The desk: the life of every item from acceptance to its one end. No sockets, no processes, no clock.

::

    submit ─▶ QUEUED ─ grant ─▶ LEASED ─ done ─▶ FINISHED ─▶ deliver (exactly once)
                ▲                  │
                └── worker_died ───┘        abort, expire, close end an item from either state

A worker that does not answer an expired item's abort keeps its lease, but the client is told: the engine may hang.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from enginepool.dispatcher.assign import BatchRule, WorkerLoad, assign_slice, assign_trial, reserve_for_trial, trial_workers
from enginepool.dispatcher.backlog import Backlog, ClientId, Item
from enginepool.dispatcher.leases import Leases
from enginepool.dispatcher.suspects import Death, judge
from enginepool.errors import Code, ItemError
from enginepool.protocol import NO_STAMPS, SubmitItem
from enginepool.status import ItemState

Deliver = Callable[[Item, bytes, ItemError | None, msgspec.Raw], None]
DeliverDelta = Callable[[Item, bytes], None]
SendAbort = Callable[[int, list[int]], None]
Grant = tuple[int, list[int], list[bytes]]

ABORTED = ItemError(Code.ABORTED, "aborted by the caller")
EXPIRED = ItemError(Code.DEADLINE_EXCEEDED, "the item's deadline passed before it finished")
ABORT_GRACE_S = 2.0


class Fate(msgspec.Struct, frozen=True):
    """What became of a dead worker's items. `is_charged`: the death counts against the worker, not against a suspect.

    `explained` are the deaths (worker, was charged), this one included, that turn out to be a convicted item's doing.
    """

    num_retried: int = 0
    num_apart: int = 0
    num_failed: int = 0
    is_charged: bool = True
    explained: list[tuple[int, bool]] = []


class Desk:
    """All items of a pool. `deliver` is called once an item; `send_abort` with a worker and its lease numbers."""

    def __init__(
        self,
        backlog: Backlog,
        max_slice: int,
        batch_rule: BatchRule | None,
        deliver: Deliver,
        deliver_delta: DeliverDelta,
        send_abort: SendAbort,
    ) -> None:
        self.backlog = backlog
        self.leases = Leases()
        self.batch_rule = batch_rule
        self.is_draining = False
        self.num_finished = 0
        self.num_failed = 0
        self.num_aborted = 0
        self._num_good_at_conviction = -1
        self._usable: set[int] = set()
        self._unanswered: deque[tuple[float, Item]] = deque()
        self._num_told = 0
        self._max_slice = max_slice
        self._granted_at = -math.inf
        self._deliver = deliver
        self._deliver_delta = deliver_delta
        self._send_abort = send_abort
        self._items: dict[ClientId, dict[int, Item]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether every accepted item has ended."""
        return not self.backlog and len(self.leases) == self._num_told

    def submit(self, client: ClientId, items: Sequence[SubmitItem], payloads: Sequence[bytes], now: float) -> ItemError | None:
        """Accept all or none; returns why not."""
        if self.is_draining:
            return ItemError(Code.DRAINING, "the pool is stopping and takes no new work; send it again to the next one")
        if any(entry.deadline_s is not None and math.isnan(entry.deadline_s) for entry in items):
            return ItemError(Code.INVALID_REQUEST, "`deadline_s` must be a number of seconds, not nan")  # it has no place in a heap
        if len(payloads) == 1 and len(payloads[0]) > self.backlog.max_bytes:
            return ItemError(Code.INVALID_REQUEST, f"the request has {len(payloads[0])} bytes, more than max_backlog_bytes")
        if reason := self.backlog.refusal(client, len(items), sum(map(len, payloads))):
            return ItemError(Code.OVERLOADED, reason)
        mine = self._items.setdefault(client, {}) if items else {}
        for entry, payload in zip(items, payloads, strict=True):
            if entry.seq in mine:
                continue
            deadline = math.inf if entry.deadline_s is None else now + entry.deadline_s
            item = Item(client, entry.seq, payload, now, entry.priority, deadline, max(1, entry.sequences))
            mine[entry.seq] = item
            self.backlog.push(item)
        return None

    def abort(self, client: ClientId, seqs: Iterable[int]) -> None:
        """End these items; a leased one ends when its worker says so."""
        mine = self._items.get(client, {})
        self._end_early([item for seq in seqs if (item := mine.get(seq))], ABORTED)

    def drop_client(self, client: ClientId) -> None:
        """The client is gone: nobody will read its results."""
        self._end_early(list(self._items.get(client, {}).values()), ABORTED)

    def expire(self, now: float) -> None:
        """End items whose deadline has passed; a leased one when its worker says so, or does not for too long."""
        late = self.backlog.due(now)
        if late:
            leased = [item for item in late if item.state is ItemState.LEASED and item.abort_error is None]
            self._unanswered.extend((now + ABORT_GRACE_S, item) for item in leased)
            self._end_early(late, EXPIRED)
        while self._unanswered and self._unanswered[0][0] <= now:
            item = self._unanswered.popleft()[1]
            if item.state is ItemState.LEASED:
                item.is_told = True
                self._num_told += 1
                self._end(item, b"", EXPIRED)

    def grant(self, loads: list[WorkerLoad], now: float, usable: Collection[int] | None = None) -> Iterator[Grant]:
        """Hand out what the workers want: (worker, lease numbers, payloads) until nobody wants or nothing waits.

        `usable` are all workers that are not given up, those included that will come back (by default: these).
        """
        self._granted_at = now
        self._usable = {load.index for load in loads} if usable is None else set(usable)
        by_index = {load.index: load for load in self._without_reserved(loads)}
        while grant := self._next_grant(list(by_index.values()), now):
            worker = grant[0]
            load = by_index[worker]
            by_index[worker] = WorkerLoad(
                worker, load.capacity, load.prefetch, self.leases.sequences(worker), self.leases.is_isolating(worker)
            )
            yield grant

    def delta(self, worker: int, number: int, payload: bytes) -> None:
        """A worker tells what is new in a stream; from now on the item can not be run again unseen."""
        item = self.leases.find(number, worker)
        if item is not None and item.abort_error is None:
            item.has_streamed = True
            self._deliver_delta(item, payload)

    def done(self, worker: int, number: int, payload: bytes, error: ItemError | None, stamps: msgspec.Raw = NO_STAMPS) -> None:
        """A worker answered; an answer of an older attempt finds no lease and is dropped."""
        item = self.leases.finish(number, worker)
        if item is not None and item.is_told:
            self._num_told -= 1
        elif item is not None:
            if error is not None and error.code is Code.ABORTED:
                error = item.abort_error or error
            self._end(item, payload, error, stamps)

    def worker_died(self, worker: int, death: Death, num_workers: int) -> Fate:
        """Put a dead worker's items back, apart from others where they are suspects, or fail the killer."""
        is_trial = self.leases.is_isolating(worker)
        lost = self.leases.revoke(worker)  # with those whose clients were told already: they may be to blame
        self._num_told -= sum(item.is_told for item in lost)
        verdict = judge(lost, worker, death, is_trial=is_trial, num_workers=num_workers)
        is_charged = not is_trial and not verdict.convicted
        if is_charged:
            for item in lost:
                item.charged_in.append(worker)
        others = [*verdict.retried, *(item for group in verdict.groups for item in group)]
        num_failed = self._end_streams(others, f"worker {worker} {death.how}")
        num_retried, num_apart = self._put_back(verdict.retried), self._put_apart(verdict.groups)
        explained = self._explained(verdict.convicted)
        for item in verdict.convicted:
            if item.is_told:
                continue
            num_failed += item.abort_error is None
            self._end(item, b"", item.abort_error or _conviction(item, worker, death))
        return Fate(num_retried, num_apart, num_failed, is_charged, explained)

    def close(self, error: ItemError) -> int:
        """End everything that is left with `error`; returns how many that were."""
        left = [item for mine in self._items.values() for item in mine.values()]
        for item in left:
            if item.state is ItemState.QUEUED:
                self.backlog.remove(item)
            elif item.lease is not None and item.last_worker is not None:
                self.leases.finish(item.lease, item.last_worker)
            self._end(item, b"", error)
        return len(left)

    def next_event(self) -> float:
        """When `expire` or a partial batch is due, or infinity.

        A batch that was due at the last `grant` and did not go waits for a worker, whose message wakes the loop.
        """
        due = self.batch_rule.next_deadline(self.backlog.oldest_arrival()) if self.batch_rule else None
        unanswered = self._unanswered[0][0] if self._unanswered else math.inf
        return min(unanswered, self.backlog.next_deadline(), math.inf if due is None or due <= self._granted_at else due)

    def _next_grant(self, loads: list[WorkerLoad], now: float) -> Grant | None:
        if not loads or not self.backlog:
            return None
        if (suspects := self.backlog.next_trial()) and (worker := assign_trial(loads, self._allowed(suspects))) is not None:
            return self._lease(self.backlog.pop_trial(), worker, now, alone=True)
        waiting = self.backlog.num_shared
        if self.batch_rule:
            oldest = self.backlog.oldest_arrival()
            chosen = self.batch_rule.assign(loads, waiting, oldest, now, flush=self.is_draining)
            return self._lease(self._pop_items(chosen.num_sequences), chosen.index, now) if chosen else None
        chosen = assign_slice(loads, waiting, self._max_slice)
        return self._lease(self._pop_sequences(chosen.num_sequences), chosen.index, now) if chosen else None

    def _allowed(self, suspects: list[Item]) -> set[int]:
        return trial_workers(self._usable, {worker for item in suspects for worker in item.died_in})

    def _without_reserved(self, loads: list[WorkerLoad]) -> list[WorkerLoad]:
        """The workers that take new work while one is being emptied for suspects."""
        suspects = self.backlog.next_trial()
        if not suspects or assign_trial(loads, self._allowed(suspects)) is not None:
            return loads
        reserved = reserve_for_trial(loads, self._allowed(suspects))
        return [load for load in loads if load.index != reserved]

    def _lease(self, items: list[Item], worker: int, now: float, *, alone: bool = False) -> Grant | None:
        if not items:
            return None
        numbers = self.leases.grant(items, worker, now, alone=alone)
        return worker, numbers, [item.payload for item in items]

    def _pop_items(self, count: int) -> list[Item]:
        return [item for _ in range(count) if (item := self.backlog.pop())]

    def _pop_sequences(self, budget: int) -> list[Item]:
        items: list[Item] = []
        while budget > 0 and (item := self.backlog.pop()):
            items.append(item)
            budget -= item.sequences
        return items

    def _end_early(self, items: list[Item], error: ItemError) -> None:
        to_worker: dict[int, list[int]] = {}
        for item in items:
            if item.state is ItemState.QUEUED:
                self.backlog.remove(item)
                self._end(item, b"", error)
            elif item.state is ItemState.LEASED and item.abort_error is None and item.lease is not None:
                item.abort_error = error
                to_worker.setdefault(item.last_worker or 0, []).append(item.lease)
        for worker, numbers in to_worker.items():
            self._send_abort(worker, numbers)

    def _end_streams(self, items: list[Item], what: str) -> int:
        """Of these, end the streams whose first delta was delivered; returns how many."""
        begun = [item for item in items if item.has_streamed and item.abort_error is None]
        for item in begun:
            self._end(item, b"", ItemError(Code.WORKER_LOST, f"{what} after this stream had begun; its text so far was delivered"))
        return len(begun)

    def _put_back(self, items: list[Item]) -> int:
        wanted = self._still_wanted(items)
        self.backlog.push_back(wanted)
        return len(wanted)

    def _put_apart(self, groups: list[list[Item]]) -> int:
        wanted = [group for items in groups if (group := self._still_wanted(items))]
        self.backlog.push_trials(wanted)
        return sum(map(len, wanted))

    def _still_wanted(self, items: list[Item]) -> list[Item]:
        """Of items whose worker died, those that have not ended; the end that an abort had asked for comes now."""
        left = [item for item in items if item.state is not ItemState.FINISHED]
        for item in left:
            if item.abort_error is not None:
                self._end(item, b"", item.abort_error)
        return [item for item in left if item.abort_error is None]

    def _explained(self, convicted: list[Item]) -> list[tuple[int, bool]]:
        """The deaths that were not the workers' fault; none while nothing else gets done between two convictions."""
        if not convicted:
            return []
        num_good = self.num_finished - self.num_failed - self.num_aborted
        has_worked, self._num_good_at_conviction = num_good > self._num_good_at_conviction, num_good
        return [death for item in convicted for death in _charges_of(item)] if has_worked else []

    def _end(self, item: Item, payload: bytes, error: ItemError | None, stamps: msgspec.Raw = NO_STAMPS) -> None:
        item.state = ItemState.FINISHED
        item.payload = b""
        self.backlog.forget_deadline(item)
        mine = self._items[item.client]
        del mine[item.seq]
        if not mine:
            del self._items[item.client]
        self.num_finished += 1
        is_aborted = error is not None and error.code is Code.ABORTED
        self.num_aborted += is_aborted
        self.num_failed += error is not None and not is_aborted
        self._deliver(item, payload, error, stamps)


def _charges_of(item: Item) -> list[tuple[int, bool]]:
    uncharged = (Counter(item.died_in) - Counter(item.charged_in)).elements()
    return [(worker, True) for worker in item.charged_in] + [(worker, False) for worker in uncharged]


def _conviction(item: Item, worker: int, death: Death) -> ItemError:
    story = f"it was in {item.deaths} worker death{'s' * (item.deaths > 1)}, {item.attempts} attempt{'s' * (item.attempts > 1)}"
    if death.hangs_in_admission:
        return ItemError(Code.TIMEOUT, f"worker {worker} {death.how}, while the engine was taking this item in; {story}")
    when = "while the engine was taking this item in" if item.lease == death.admitting else "while this item ran alone in it"
    return ItemError(Code.WORKER_LOST, f"worker {worker} {death.how} {when}; {story}")

"""Every accepted item ends exactly once, whatever is submitted, aborted, late, killed or closed, in both batching modes."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest

from enginepool.dispatcher.assign import BatchRule, WorkerLoad
from enginepool.dispatcher.backlog import Backlog, Item
from enginepool.dispatcher.desk import ABORT_GRACE_S, Desk, Fate, Grant
from enginepool.dispatcher.suspects import Cause, Death
from enginepool.errors import Code, ItemError
from enginepool.protocol import NO_STAMPS, SubmitItem
from enginepool.status import ItemState

ENGINE_ERROR = ItemError(Code.WORKER_LOST, "the engine said no")
ABORTED = ItemError(Code.ABORTED, "aborted by the caller")
STOPPED = ItemError(Code.DRAINING, "the pool stopped")
RULE = BatchRule(size=4, timeout_s=0.5)
KILLED = Death("was killed by SIGKILL", Cause.OUTSIDE)
SEGV = Death("was killed by SIGSEGV")


class Office:
    """A desk with everything it delivers and every abort it sends written down."""

    def __init__(self, rule: BatchRule | None = None, *, max_items: int = 1000, max_bytes: int = 100_000, max_slice: int = 32) -> None:
        self.delivered: list[tuple[Item, bytes, Code | None]] = []
        self.aborts: list[tuple[int, list[int]]] = []
        self.stamps: list[msgspec.Raw] = []
        self.deltas: list[tuple[int, bytes]] = []
        self.messages: dict[int, str] = {}
        self.desk = Desk(Backlog(max_items, max_bytes), max_slice, rule, self._deliver, self._deliver_delta, self._abort)

    def _deliver(self, item: Item, payload: bytes, error: ItemError | None, stamps: msgspec.Raw) -> None:
        self.delivered.append((item, payload, error.code if error else None))
        self.stamps.append(stamps)
        if error is not None:
            self.messages[item.seq] = error.message

    def _deliver_delta(self, item: Item, payload: bytes) -> None:
        self.deltas.append((item.seq, payload))

    def _abort(self, worker: int, leases: list[int]) -> None:
        self.aborts.append((worker, leases))

    def submit(self, *items: SubmitItem, client: bytes = b"a", now: float = 0.0) -> ItemError | None:
        return self.desk.submit(client, items, [b"request %d" % item.seq for item in items], now)

    def submit_seqs(self, *seqs: int, client: bytes = b"a", now: float = 0.0) -> None:
        assert self.submit(*map(SubmitItem, seqs), client=client, now=now) is None

    def grant(self, now: float = 0.0, *, workers: int = 1, capacity: int = 100) -> list[Grant]:
        leases = self.desk.leases
        loads = [WorkerLoad(index, capacity, 0, leases.sequences(index), leases.is_isolating(index)) for index in range(workers)]
        return list(self.desk.grant(loads, now))

    def granted_seqs(self, now: float = 0.0, *, workers: int = 1, capacity: int = 100) -> list[list[int]]:
        return [seqs_of(grant) for grant in self.grant(now, workers=workers, capacity=capacity)]

    def lease_one(self, *, client: bytes = b"a", deadline_s: float | None = None) -> int:
        self.submit(SubmitItem(1, deadline_s=deadline_s), client=client)
        ((_, (number,), _),) = self.grant()
        return number

    @property
    def endings(self) -> dict[int, Code | None]:
        return {item.seq: code for item, _, code in self.delivered}


def seqs_of(grant: Grant) -> list[int]:
    return [int(payload.split()[1]) for payload in grant[2]]


# One item from submit to its end.


def test_done_delivers_the_answer_of_the_worker() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.done(0, number, b"answer", None)
    ((item, payload, code),) = office.delivered
    assert (item.seq, item.last_worker, item.attempts, payload, code) == (1, 0, 1, b"answer", None)
    assert office.desk.is_idle


def test_done_forwards_the_stamps_of_the_worker_unread() -> None:
    office, stamps = Office(), msgspec.Raw(b"whatever")
    office.desk.done(0, office.lease_one(), b"answer", None, stamps)
    assert office.stamps == [stamps]


def test_end_without_an_answer_has_no_stamps() -> None:
    office = Office()
    office.lease_one()
    office.desk.close(STOPPED)
    assert office.stamps == [NO_STAMPS]


def test_done_with_an_error_counts_as_failed() -> None:
    office = Office()
    office.desk.done(0, office.lease_one(), b"", ENGINE_ERROR)
    assert office.endings == {1: Code.WORKER_LOST}
    assert (office.desk.num_finished, office.desk.num_failed) == (1, 1)


def test_done_twice_delivers_once() -> None:
    office = Office()
    number = office.lease_one()
    for _ in range(2):
        office.desk.done(0, number, b"answer", None)
    assert len(office.delivered) == 1


def test_done_by_a_worker_that_does_not_hold_it_is_dropped() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.done(1, number, b"forged", None)
    assert office.delivered == []


def test_done_of_an_old_lease_is_dropped() -> None:
    office = Office()
    old = office.lease_one()
    office.desk.worker_died(0, KILLED, 1)
    ((_, (new,), _),) = office.grant()
    office.desk.done(0, old, b"late", None)
    office.desk.done(0, new, b"fresh", None)
    assert [payload for _, payload, _ in office.delivered] == [b"fresh"]


def test_grant_carries_the_payload_that_was_submitted() -> None:
    office = Office()
    office.submit_seqs(1, 2)
    ((_, numbers, payloads),) = office.grant()
    assert payloads == [b"request 1", b"request 2"]
    assert len(set(numbers)) == 2


def test_submit_of_a_seq_in_flight_is_taken_once() -> None:
    office = Office()
    office.submit_seqs(1, 1)
    office.submit_seqs(1)
    assert office.granted_seqs() == [[1]]


def test_submit_same_seq_of_two_clients_are_two_items() -> None:
    office = Office()
    office.submit_seqs(1, client=b"a")
    office.submit_seqs(1, client=b"b")
    assert office.granted_seqs() == [[1, 1]]


# Admission.


@pytest.mark.parametrize(
    "limits",
    [pytest.param({"max_items": 2}, id="items"), pytest.param({"max_bytes": 20}, id="bytes")],
)
def test_submit_beyond_the_bound_is_refused_whole(limits: dict[str, int]) -> None:
    office = Office(max_items=limits.get("max_items", 1000), max_bytes=limits.get("max_bytes", 1000))
    office.submit_seqs(1)
    error = office.submit(SubmitItem(2), SubmitItem(3))
    assert error is not None
    assert (error.code, error.is_retryable, len(office.desk.backlog)) == (Code.OVERLOADED, True, 1)


def test_submit_has_room_again_after_a_grant() -> None:
    office = Office(max_items=1)
    office.submit_seqs(1)
    office.grant()
    assert office.submit(SubmitItem(2)) is None


def test_submit_while_draining_is_refused_as_retryable() -> None:
    office = Office()
    office.desk.is_draining = True
    error = office.submit(SubmitItem(1))
    assert error is not None
    assert (error.code, error.is_retryable) == (Code.DRAINING, True)


def test_submit_with_a_deadline_that_is_no_number_is_refused() -> None:
    office = Office()
    error = office.submit(SubmitItem(1), SubmitItem(2, deadline_s=math.nan))
    assert error is not None
    assert (error.code, office.desk.is_idle) == (Code.INVALID_REQUEST, True)


# Order and shares.


def test_grant_goes_by_priority_then_client_then_arrival() -> None:
    office = Office()
    office.submit(SubmitItem(1, priority=1), SubmitItem(2), SubmitItem(3), client=b"a")
    office.submit(SubmitItem(11), SubmitItem(12, priority=-1), client=b"b")
    assert office.granted_seqs() == [[12, 2, 11, 3, 1]]


def test_grant_counts_samples_against_the_window() -> None:
    office = Office()
    office.submit(*[SubmitItem(seq, sequences=4) for seq in range(3)])
    assert [seq for seqs in office.granted_seqs(capacity=8) for seq in seqs] == [0, 1]
    assert office.desk.leases.sequences(0) == 8


def test_grant_runs_an_item_larger_than_the_window_all_the_same() -> None:
    office = Office()
    office.submit(SubmitItem(1, sequences=50))
    assert office.granted_seqs(capacity=8) == [[1]]


@pytest.mark.parametrize("sequences", [0, -7])
def test_grant_counts_a_nonsense_number_of_samples_as_one(sequences: int) -> None:
    office = Office()
    office.submit(SubmitItem(1, sequences=sequences))
    office.grant()
    assert office.desk.leases.sequences(0) == 1


def test_grant_spreads_a_short_backlog_over_workers() -> None:
    office = Office()
    office.submit_seqs(*range(4))
    office.grant(workers=2)
    assert [office.desk.leases.in_hand(worker) for worker in (0, 1)] == [2, 2]


def test_grant_is_cut_into_slices() -> None:
    office = Office(max_slice=3)
    office.submit_seqs(*range(8))
    assert [len(seqs) for seqs in office.granted_seqs()] == [3, 3, 2]


# Death of a worker.


def test_worker_died_puts_items_first_in_line_in_order() -> None:
    office = Office()
    office.submit_seqs(1, 2, 3)
    office.grant(capacity=2)
    assert office.desk.worker_died(0, KILLED, 1) == Fate(num_retried=2)
    assert office.granted_seqs() == [[1, 2, 3]]


def test_worker_died_twice_tries_suspects_apart_and_others_wait() -> None:
    office = Office()
    office.submit_seqs(1, 2)
    for _ in range(2):
        office.grant()
        fate = office.desk.worker_died(0, SEGV, 1)
    assert fate == Fate(num_apart=2)
    office.submit_seqs(3, client=b"b")
    assert office.granted_seqs() == [[1]]
    assert office.granted_seqs() == []


def test_worker_died_alone_convicts_with_the_story_and_explains_the_deaths_before() -> None:
    office = Office()
    office.submit_seqs(1)
    fates = []
    for _ in range(3):
        office.grant()
        fates.append(office.desk.worker_died(0, SEGV, 1))
    assert fates == [
        Fate(num_retried=1),
        Fate(num_apart=1),
        Fate(num_failed=1, is_charged=False, explained=[(0, True), (0, True), (0, False)]),
    ]
    assert office.messages[1] == "worker 0 was killed by SIGSEGV while this item ran alone in it; it was in 3 worker deaths, 3 attempts"
    assert office.desk.is_idle


def _convict(office: Office, seq: int) -> list[tuple[int, bool]]:
    """Let an item kill its worker in its admission, twice; returns the deaths that this explains."""
    office.submit_seqs(seq)
    for _ in range(2):
        ((_, (number,), _),) = office.grant()
        fate = office.desk.worker_died(0, Death("exited with code 9", admitting=number), 1)
    assert fate.num_failed == 1
    return fate.explained


def test_convictions_explain_deaths_only_while_other_items_finish() -> None:
    office = Office()
    assert _convict(office, 1) == [(0, True), (0, False)]
    assert _convict(office, 2) == [], "nothing but convictions: the workers may be at fault"
    office.submit_seqs(3)
    ((_, (number,), _),) = office.grant()
    office.desk.done(0, number, b"answer", None)
    assert _convict(office, 4) == [(0, True), (0, False)]


def test_admission_that_hangs_fails_its_item_as_timeout() -> None:
    office = Office()
    office.submit_seqs(1, 2)
    ((_, numbers, _),) = office.grant()
    death = Death("was killed, for it hangs", admitting=numbers[1], hangs_in_admission=True)
    assert office.desk.worker_died(0, death, 2) == Fate(num_retried=1, num_failed=1, is_charged=False, explained=[(0, False)])
    assert office.endings == {2: Code.TIMEOUT}


def _suspect(office: Office, seq: int) -> None:
    """Make an item suspected of having killed worker 1 in its admission."""
    office.submit_seqs(seq)
    ((worker, (number,), _),) = office.grant()
    office.desk.worker_died(worker, Death("exited with code 9", admitting=number), 2)


def test_busy_worker_is_emptied_for_suspects_when_no_fresh_one_is_to_come() -> None:
    office = Office()
    _suspect(office, 1)
    office.submit_seqs(2, 3)
    loads = [WorkerLoad(1, 100, 0, 5), WorkerLoad(2, 100, 0, 3)]
    granted = list(office.desk.grant(loads, 0.0, [0, 1, 2]))
    assert [(grant[0], seqs_of(grant)) for grant in granted] == [(1, [2, 3])]


def test_busy_workers_go_on_while_a_fresh_one_is_to_come() -> None:
    office = Office()
    _suspect(office, 1)
    office.submit_seqs(2, 3)
    loads = [WorkerLoad(1, 100, 0, 5), WorkerLoad(2, 100, 0, 3)]
    granted = list(office.desk.grant(loads, 0.0, [0, 1, 2, 3]))
    assert [(grant[0], seqs_of(grant)) for grant in granted] == [(2, [2]), (2, [3])]


def test_worker_died_with_an_aborted_item_ends_it_as_aborted() -> None:
    office = Office()
    office.lease_one()
    office.desk.abort(b"a", [1])
    office.desk.worker_died(0, KILLED, 1)
    assert office.endings == {1: Code.ABORTED}
    assert office.desk.is_idle


def test_worker_died_leaves_the_hand_of_others_alone() -> None:
    office = Office()
    office.submit_seqs(1, 2)
    grants = {grant[0]: grant for grant in office.grant(workers=2)}
    office.desk.worker_died(0, KILLED, 1)
    office.desk.done(1, grants[1][1][0], b"fine", None)
    assert list(office.endings) == seqs_of(grants[1])


# Streams.


def test_delta_is_delivered_and_ends_nothing() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.delta(0, number, b"new")
    assert (office.deltas, office.delivered) == ([(1, b"new")], [])
    office.desk.done(0, number, b"rest", None)
    assert office.endings == {1: None}


@pytest.mark.parametrize(("worker", "offset"), [(0, 7), (1, 0)], ids=["unknown lease", "another worker's lease"])
def test_delta_of_no_such_lease_is_dropped(worker: int, offset: int) -> None:
    office = Office()
    number = office.lease_one()
    office.desk.delta(worker, number + offset, b"forged")
    assert office.deltas == []
    assert office.desk.worker_died(0, KILLED, 1) == Fate(num_retried=1), "a forged delta must not make it unrepeatable"


def test_delta_of_an_old_lease_is_dropped() -> None:
    office = Office()
    old = office.lease_one()
    office.desk.worker_died(0, KILLED, 1)
    ((_, (new,), _),) = office.grant()
    office.desk.delta(0, old, b"late")
    office.desk.delta(0, new, b"fresh")
    assert office.deltas == [(1, b"fresh")]


def test_delta_after_the_end_is_dropped() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.done(0, number, b"answer", None)
    office.desk.delta(0, number, b"late")
    assert office.deltas == []


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_delta_of_an_item_that_is_being_aborted_is_dropped(end: str) -> None:
    office = Office()
    number = office.lease_one(deadline_s=1.0)
    office.desk.delta(0, number, b"before")
    if end == "abort":
        office.desk.abort(b"a", [1])
    else:
        office.desk.expire(2.0)
    office.desk.delta(0, number, b"after")
    assert office.deltas == [(1, b"before")]
    assert office.aborts == [(0, [number])]


def test_worker_died_before_the_first_delta_of_a_stream_runs_it_again() -> None:
    office = Office()
    office.lease_one()
    assert office.desk.worker_died(0, KILLED, 1) == Fate(num_retried=1)
    ((_, (number,), _),) = office.grant()
    office.desk.delta(0, number, b"new")
    office.desk.done(0, number, b"rest", None)
    assert office.endings == {1: None}


def test_worker_died_within_a_stream_ends_it_with_the_story_and_spares_its_neighbours() -> None:
    office = Office()
    office.submit_seqs(1, 2)
    ((_, numbers, _),) = office.grant()
    office.desk.delta(0, numbers[0], b"new")
    assert office.desk.worker_died(0, KILLED, 1) == Fate(num_retried=1, num_failed=1)
    assert office.endings == {1: Code.WORKER_LOST}
    assert office.messages[1].startswith("worker 0 was killed by SIGKILL after this stream had begun")
    assert office.granted_seqs() == [[2]]


def test_worker_died_with_an_aborted_stream_ends_it_as_aborted() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.delta(0, number, b"new")
    office.desk.abort(b"a", [1])
    office.desk.worker_died(0, KILLED, 1)
    assert office.endings == {1: Code.ABORTED}
    assert office.desk.is_idle


# Abort, deadline, clients that go, closing.


def test_abort_ends_a_waiting_item_at_once() -> None:
    office = Office()
    office.submit_seqs(1, 2)
    office.desk.abort(b"a", [1, 99])
    assert (office.endings, office.granted_seqs()) == ({1: Code.ABORTED}, [[2]])


def test_abort_tells_the_worker_once_and_waits_for_it() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.abort(b"a", [1])
    office.desk.abort(b"a", [1])
    assert (office.aborts, office.delivered) == ([(0, [number])], [])
    office.desk.done(0, number, b"", ABORTED)
    assert office.endings == {1: Code.ABORTED}


def test_abort_that_comes_too_late_keeps_the_answer() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.abort(b"a", [1])
    office.desk.done(0, number, b"answer", None)
    assert office.endings == {1: None}


def test_abort_of_another_clients_item_does_nothing() -> None:
    office = Office()
    office.submit_seqs(1)
    office.desk.abort(b"b", [1])
    assert office.delivered == []


def test_expire_ends_waiting_items_when_their_time_is_over() -> None:
    office = Office()
    office.submit(SubmitItem(1, deadline_s=2.0), SubmitItem(2), now=10.0)
    office.desk.expire(11.9)
    assert office.delivered == []
    office.desk.expire(12.0)
    assert (office.endings, office.granted_seqs()) == ({1: Code.DEADLINE_EXCEEDED}, [[2]])


def test_expire_aborts_a_running_item_which_ends_as_late() -> None:
    office = Office()
    number = office.lease_one(deadline_s=2.0)
    office.desk.expire(3.0)
    assert office.aborts == [(0, [number])]
    office.desk.done(0, number, b"", ABORTED)
    assert office.endings == {1: Code.DEADLINE_EXCEEDED}


def test_drop_client_ends_its_items_and_no_others() -> None:
    office = Office()
    office.submit_seqs(1, 2, client=b"a")
    office.submit_seqs(3, client=b"b")
    office.grant(capacity=1)
    office.desk.drop_client(b"a")
    assert office.endings == {2: Code.ABORTED}
    assert len(office.aborts) == 1
    assert office.granted_seqs(workers=2) == [[3]]


def test_close_ends_everything_with_the_reason() -> None:
    office = Office()
    office.submit_seqs(1, 2, 3)
    office.grant(capacity=1)
    assert office.desk.close(STOPPED) == 3
    assert office.endings == {1: Code.DRAINING, 2: Code.DRAINING, 3: Code.DRAINING}
    assert office.desk.is_idle


def test_close_leaves_nothing_for_a_late_answer() -> None:
    office = Office()
    number = office.lease_one()
    office.desk.close(STOPPED)
    office.desk.done(0, number, b"late", None)
    assert office.endings == {1: Code.DRAINING}


# Static mode.


def test_static_full_batch_goes_at_once() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(4), now=10.0)
    assert office.granted_seqs(now=10.0) == [[0, 1, 2, 3]]


def test_static_partial_batch_goes_after_the_timeout() -> None:
    office = Office(RULE)
    office.submit_seqs(1, 2, now=10.0)
    assert office.granted_seqs(now=10.4) == []
    assert office.desk.next_event() == 10.5
    assert office.granted_seqs(now=10.5) == [[1, 2]]


def test_static_worker_gets_one_batch_at_a_time() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(9), now=10.0)
    ((_, numbers, _),) = office.grant(10.0)
    for number in numbers[:-1]:
        office.desk.done(0, number, b"", None)
    assert office.grant(99.0) == []
    office.desk.done(0, numbers[-1], b"", None)
    assert office.granted_seqs(now=99.0) == [[4, 5, 6, 7]]


def test_static_batches_are_filled_for_one_worker_after_the_other() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(6), now=10.0)
    assert office.granted_seqs(now=10.5, workers=2) == [[0, 1, 2, 3], [4, 5]]


def test_static_batch_counts_items_not_samples() -> None:
    office = Office(RULE)
    office.submit(*[SubmitItem(seq, sequences=8) for seq in range(4)])
    assert office.granted_seqs() == [[0, 1, 2, 3]]


def test_static_drain_flushes_a_partial_batch() -> None:
    office = Office(RULE)
    office.submit_seqs(1, now=10.0)
    office.desk.is_draining = True
    assert office.granted_seqs(now=10.0) == [[1]]


def test_static_timer_starts_anew_with_the_next_waiting_item() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(4), now=10.0)
    office.submit_seqs(4, now=10.3)
    office.grant(10.3)
    assert office.desk.next_event() == 10.8


def test_static_timer_rests_while_nothing_waits() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(4), now=10.0)
    office.grant(10.0)
    assert office.desk.next_event() == math.inf


def test_static_timer_of_a_due_batch_does_not_wake_while_every_worker_is_busy() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(5), now=10.0)
    office.grant(10.0)
    office.grant(11.0)
    assert office.desk.next_event() == math.inf


def test_static_suspects_run_apart() -> None:
    office = Office(RULE)
    office.submit_seqs(*range(4))
    for _ in range(2):
        office.grant()
        office.desk.worker_died(0, KILLED, 1)
    assert office.granted_seqs(now=99.0) == [[0]]


# A worker that does not answer.


def test_expired_item_of_a_silent_worker_is_told_after_a_grace_and_its_late_answer_is_dropped() -> None:
    office = Office()
    number = office.lease_one(deadline_s=1.0)
    office.desk.expire(1.0)
    assert (office.endings, office.aborts, office.desk.next_event()) == ({}, [(0, [number])], 1.0 + ABORT_GRACE_S)
    office.desk.expire(1.0 + ABORT_GRACE_S)
    assert (office.endings, office.desk.is_idle, office.desk.leases.in_hand(0)) == ({1: Code.DEADLINE_EXCEEDED}, True, 1)
    office.desk.done(0, number, b"late", None)
    assert (len(office.delivered), office.desk.is_idle, office.desk.leases.in_hand(0)) == (1, True, 0)


def test_death_of_a_silent_worker_does_not_run_a_told_item_again() -> None:
    office = Office()
    office.lease_one(deadline_s=1.0)
    office.desk.expire(1.0)
    office.desk.expire(1.0 + ABORT_GRACE_S)
    assert office.desk.worker_died(0, KILLED, 1) == Fate()
    assert (len(office.delivered), office.granted_seqs(), office.desk.is_idle) == (1, [], True)


def test_neighbour_of_a_told_item_has_not_died_alone() -> None:
    office = Office()
    office.submit(SubmitItem(1, deadline_s=1.0), SubmitItem(2))
    office.grant()
    office.desk.expire(1.0)
    office.desk.expire(1.0 + ABORT_GRACE_S)
    assert office.desk.worker_died(0, SEGV, 1) == Fate(num_retried=1)
    item = office.desk.backlog.pop()
    assert item is not None
    assert (item.seq, item.deaths, item.evidence) == (2, 1, 0)


def test_next_event_is_the_earlier_of_deadline_and_batch() -> None:
    office = Office(RULE)
    office.submit(SubmitItem(1, deadline_s=0.25), now=10.0)
    assert office.desk.next_event() == 10.25


# Everything at once: random operations against a plain model of who holds what.


class Model:
    """Does random things to a desk and keeps its own books."""

    CLIENTS = (b"a", b"b", b"c")
    NUM_WORKERS = 3

    def __init__(self, seed: int, rule: BatchRule | None) -> None:
        self.draw = random.Random(seed)
        self.office = Office(rule, max_items=60, max_bytes=600, max_slice=self.draw.randint(1, 8))
        self.desk = self.office.desk
        self.now = 0.0
        self.next_seq = 0
        self.accepted: set[int] = set()
        self.held: dict[int, dict[int, int]] = {worker: {} for worker in range(self.NUM_WORKERS)}
        self.past_leases: list[tuple[int, int]] = []
        self.begun: set[int] = set()

    def run(self, num_steps: int) -> None:
        actions = [self.submit, self.submit, self.grant, self.grant, self.answer, self.answer, self.answer_late, self.forge, self.die]
        actions += [self.abort, self.wait, self.leave, self.stream, self.stream_late]
        for _ in range(num_steps):
            self.draw.choice(actions)()
            self.check()

    def submit(self) -> None:
        seqs = range(self.next_seq, self.next_seq + self.draw.randint(1, 8))
        self.next_seq = seqs.stop
        items = [
            SubmitItem(seq, self.draw.randint(-1, 1), self.draw.choice([None, None, 0.2, 5.0]), self.draw.choice([1, 1, 4])) for seq in seqs
        ]
        if self.office.submit(*items, client=self.draw.choice(self.CLIENTS), now=self.now) is None:
            self.accepted.update(seqs)

    def grant(self) -> None:
        for grant in self.office.grant(self.now, workers=self.NUM_WORKERS, capacity=8):
            hand = self.held[grant[0]]
            was_empty = not hand
            hand.update(zip(grant[1], seqs_of(grant), strict=True))
            assert was_empty or not (self.desk.batch_rule or self.desk.leases.is_isolating(grant[0]))

    def answer(self) -> None:
        worker = self.draw.randrange(self.NUM_WORKERS)
        if not self.held[worker]:
            return
        number = self.draw.choice(list(self.held[worker]))
        seq = self.held[worker].pop(number)
        self.past_leases.append((worker, number))
        before, was_told = len(self.office.delivered), seq in self.office.endings
        self.desk.done(worker, number, b"answer %d" % seq, self.draw.choice([None, None, ENGINE_ERROR]))
        assert [item.seq for item, _, _ in self.office.delivered[before:]] == ([] if was_told else [seq])

    def stream(self) -> None:
        live = [(worker, number, seq) for worker, hand in self.held.items() for number, seq in hand.items()]
        if live:
            worker, number, seq = self.draw.choice(live)
            before = len(self.office.deltas)
            self.desk.delta(worker, number, b"delta %d" % seq)
            assert self.office.deltas[before:] in ([], [(seq, b"delta %d" % seq)])
            self.begun |= {seq for seq, _ in self.office.deltas[before:]}

    def stream_late(self) -> None:
        if self.past_leases:
            before = len(self.office.deltas)
            worker, number = self.draw.choice(self.past_leases)
            self.desk.delta(self.draw.choice([worker, 0]), number, b"late")
            assert len(self.office.deltas) == before

    def answer_late(self) -> None:
        if self.past_leases:
            before = len(self.office.delivered)
            worker, number = self.draw.choice(self.past_leases)
            self.desk.done(self.draw.choice([worker, 0]), number, b"late", None)
            assert len(self.office.delivered) == before

    def forge(self) -> None:
        """A worker answers what another one holds."""
        live = [(worker, number) for worker, hand in self.held.items() for number in hand]
        if live:
            before = len(self.office.delivered)
            worker, number = self.draw.choice(live)
            self.desk.done((worker + 1) % self.NUM_WORKERS, number, b"forged", None)
            assert len(self.office.delivered) == before

    def die(self) -> None:
        worker = self.draw.randrange(self.NUM_WORKERS)
        self.past_leases += [(worker, number) for number in self.held[worker]]
        lost = set(self.held[worker].values()) - self.office.endings.keys()
        before, streams = len(self.office.delivered), self.begun & lost
        numbers = [0, *self.held[worker]]
        cause, admitting = self.draw.choice([Cause.OUTSIDE, Cause.INSIDE]), self.draw.choice([None, None, self.draw.choice(numbers)])
        death = Death("was killed", cause, admitting or None, numbers[-2:], hangs_in_admission=self.draw.random() < 0.1)
        self.held[worker].clear()
        fate = self.desk.worker_died(worker, death, self.NUM_WORKERS)
        assert fate.num_retried + fate.num_apart + len(self.office.delivered) - before == len(lost)
        assert streams <= {item.seq for item, _, _ in self.office.delivered[before:]}, "a stream that had begun would run again"

    def abort(self) -> None:
        seqs = [self.draw.randrange(self.next_seq + 1) for _ in range(3)]
        self.desk.abort(self.draw.choice(self.CLIENTS), seqs)

    def wait(self) -> None:
        self.now += self.draw.choice([0.1, 1.0, 3.0])
        self.desk.expire(self.now)

    def leave(self) -> None:
        if self.draw.random() < 0.2:
            self.desk.drop_client(self.draw.choice(self.CLIENTS))

    def check(self) -> None:
        """The desk's counts are the model's, and nobody is in two places."""
        ended = Counter(item.seq for item, _, _ in self.office.delivered)
        held = [seq for hand in self.held.values() for seq in hand.values()]
        num_waiting = len(self.desk.backlog)
        assert not ended or max(ended.values()) == 1
        assert len(set(held)) == len(held) == len(self.desk.leases)
        told = ended.keys() & set(held)
        assert {self.office.endings[seq] for seq in told} <= {Code.DEADLINE_EXCEEDED}
        assert len(self.accepted) == len(ended) + len(held) - len(told) + num_waiting
        assert (self.desk.backlog.num_bytes == 0) == (num_waiting == 0)

    def settle(self) -> None:
        """Let the workers finish everything."""
        while not self.desk.is_idle:
            self.now += 1.0
            self.grant()
            for worker in range(self.NUM_WORKERS):
                while self.held[worker]:
                    self.answer()
            self.check()


@pytest.mark.parametrize("rule", [None, RULE], ids=["continuous", "static"])
@pytest.mark.parametrize("ending", ["settle", "close"])
@pytest.mark.parametrize("seed", range(12))
def test_random_operations_end_every_item_exactly_once(seed: int, ending: str, rule: BatchRule | None) -> None:
    model = Model(seed, rule)
    model.run(400)
    if ending == "settle":
        model.settle()
    else:
        model.desk.close(STOPPED)
    assert sorted(item.seq for item, _, _ in model.office.delivered) == sorted(model.accepted)
    assert all(item.state is ItemState.FINISHED and item.payload == b"" for item, _, _ in model.office.delivered)
    assert (model.desk.num_finished, model.desk.backlog.num_bytes, model.desk.is_idle) == (len(model.accepted), 0, True)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_deliver_the_answer_that_belongs(seed: int) -> None:
    model = Model(seed, None)
    model.run(400)
    answers = [(item.seq, payload) for item, payload, code in model.office.delivered if code is None]
    assert answers
    assert all(payload == b"answer %d" % seq for seq, payload in answers)

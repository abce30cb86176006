"""The backlog hands out by priority, then client by client, then by arrival, and counts what waits exactly."""

from __future__ import annotations

import math

import pytest

from enginepool.dispatcher.backlog import Backlog, Item
from enginepool.dispatcher.leases import Leases
from enginepool.status import ItemState


def _item(seq: int, client: bytes = b"a", *, received: float = 0.0, priority: int = 0, deadline: float = math.inf) -> Item:
    return Item(client, seq, b"four", received, priority, deadline)


def _backlog(*items: Item) -> Backlog:
    backlog = Backlog(max_items=1000, max_bytes=10_000)
    for item in items:
        backlog.push(item)
    return backlog


def _pop_all(backlog: Backlog) -> list[int]:
    return [item.seq for item in iter(backlog.pop, None)]


def test_pop_lower_priority_number_first() -> None:
    backlog = _backlog(_item(1, priority=5), _item(2, priority=0), _item(3, priority=-1), _item(4, priority=5))
    assert _pop_all(backlog) == [3, 2, 1, 4]


def test_pop_priority_beats_turns_of_clients() -> None:
    backlog = _backlog(_item(1, b"a", priority=1), _item(2, b"b", priority=0), _item(3, b"b", priority=0))
    assert _pop_all(backlog) == [2, 3, 1]


def test_pop_takes_clients_in_turns() -> None:
    backlog = _backlog(*[_item(seq, b"a") for seq in (1, 2, 3)], _item(11, b"b"), _item(21, b"c"), _item(12, b"b"))
    assert _pop_all(backlog) == [1, 11, 21, 2, 12, 3]


def test_pop_newcomer_does_not_wait_behind_a_long_queue() -> None:
    backlog = _backlog(*[_item(seq, b"a") for seq in range(100)])
    backlog.pop()
    backlog.push(_item(1000, b"b"))
    assert 1000 in [item.seq for item in (backlog.pop(), backlog.pop()) if item]


def test_pop_empty_gives_none() -> None:
    assert _backlog().pop() is None


def test_pop_skips_removed_items() -> None:
    items = [_item(seq) for seq in range(3)]
    backlog = _backlog(*items)
    backlog.remove(items[1])
    assert _pop_all(backlog) == [0, 2]


def test_push_back_goes_to_the_front_in_order() -> None:
    items = [_item(seq) for seq in range(4)]
    backlog = _backlog(*items)
    first, second = backlog.pop(), backlog.pop()
    assert first is items[0]
    assert second is items[1]
    backlog.push_back([first, second])
    assert _pop_all(backlog) == [0, 1, 2, 3]


def test_push_back_makes_items_wait_again_without_a_lease() -> None:
    item = _item(1)
    Leases().grant([item], 0, 0.0)
    _backlog().push_back([item])
    assert (item.state, item.lease) == (ItemState.QUEUED, None)


def test_trials_are_kept_apart_from_the_rest_and_in_their_groups() -> None:
    suspects, other = [_item(1), _item(2), _item(3)], _item(4)
    backlog = _backlog(other)
    backlog.push_trials([suspects[:2], suspects[2:]])
    assert (len(backlog), backlog.num_shared) == (4, 1)
    assert _pop_all(backlog) == [4]
    assert [backlog.pop_trial(), backlog.pop_trial(), backlog.pop_trial()] == [suspects[:2], suspects[2:], []]


def test_trials_of_the_latest_death_come_first() -> None:
    first, second, third = _item(1), _item(2), _item(3)
    backlog = _backlog()
    backlog.push_trials([[first]])
    backlog.push_trials([[second], [third]])
    assert [backlog.pop_trial() for _ in range(3)] == [[second], [third], [first]]


def test_remove_takes_a_suspect_out_of_its_group() -> None:
    suspects = [_item(1), _item(2), _item(3)]
    backlog = _backlog()
    backlog.push_trials([suspects[:1], suspects[1:]])
    backlog.remove(suspects[0])
    backlog.remove(suspects[2])
    assert (len(backlog), backlog.num_shared, backlog.next_trial()) == (1, 0, [suspects[1]])
    backlog.remove(suspects[1])
    assert (len(backlog), backlog.next_trial(), backlog.pop_trial()) == (0, [], [])


def test_counts_follow_every_move() -> None:
    items = [_item(seq) for seq in range(5)]
    backlog = _backlog(*items)
    popped = backlog.pop()
    backlog.remove(items[3])
    assert (len(backlog), backlog.num_bytes) == (3, 12)
    assert popped is not None
    backlog.push_trials([[popped]])
    assert (len(backlog), backlog.num_bytes) == (4, 16)
    while backlog.pop_trial() or backlog.pop():
        pass
    assert (len(backlog), backlog.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("num_items", "num_bytes", "told"),
    [
        pytest.param(2, 12, None, id="exactly-full"),
        pytest.param(3, 0, "the backlog is full (1 items wait; limits: 3 items, 16 bytes)", id="one-item-too-many"),
        pytest.param(1, 13, "the backlog is full (1 items wait; limits: 3 items, 16 bytes)", id="one-byte-too-many"),
        pytest.param(0, 0, None, id="nothing"),
    ],
)
def test_refusal_keeps_within_both_bounds(num_items: int, num_bytes: int, told: str | None) -> None:
    backlog = Backlog(max_items=3, max_bytes=16)
    backlog.push(_item(1))
    reason = backlog.refusal(b"newcomer", num_items, num_bytes)
    assert reason is None if told is None else str(reason).startswith(told)


@pytest.mark.parametrize(
    ("num_items", "num_bytes", "is_taken"),
    [
        pytest.param(5, 20, True, id="exactly-its-share"),
        pytest.param(6, 0, False, id="one-item-too-many"),
        pytest.param(1, 27, False, id="too-many-bytes"),
    ],
)
def test_refusal_keeps_a_quarter_from_a_client_that_has_items_waiting(num_items: int, num_bytes: int, is_taken: bool) -> None:
    backlog = Backlog(max_items=8, max_bytes=40)
    backlog.push(_item(1))
    reason = backlog.refusal(b"a", num_items, num_bytes)
    assert (
        reason is None if is_taken else "this client's share of the backlog is full (1 of its items wait; limits: 75% of 8" in str(reason)
    )
    assert backlog.refusal(b"b", num_items, num_bytes) is None


def test_refusal_lets_a_client_with_nothing_waiting_fill_the_backlog() -> None:
    backlog = Backlog(max_items=8, max_bytes=32)
    assert backlog.refusal(b"a", 8, 32) is None
    for seq in range(8):
        backlog.push(_item(seq))
    while backlog.pop():
        pass
    assert backlog.refusal(b"a", 8, 32) is None


def test_due_tells_each_late_item_once() -> None:
    waiting, leased, ended, later = (_item(seq, deadline=deadline) for seq, deadline in enumerate((1.0, 2.0, 1.5, 9.0)))
    backlog = _backlog(waiting, leased, ended, later)
    leased.state = ItemState.LEASED
    backlog.remove(ended)
    assert backlog.due(0.9) == []
    assert backlog.due(2.0) == [waiting, leased]
    assert backlog.due(2.0) == []


def test_due_survives_equal_deadlines() -> None:
    items = [_item(seq, deadline=1.0) for seq in range(5)]
    assert len(_backlog(*items).due(1.0)) == 5


def test_next_deadline_is_the_earliest_or_never() -> None:
    assert _backlog(_item(1)).next_deadline() == math.inf
    assert _backlog(_item(1, deadline=5.0), _item(2, deadline=3.0)).next_deadline() == 3.0


def test_oldest_arrival_looks_at_every_queue() -> None:
    backlog = _backlog(_item(1, b"a", received=4.0, priority=0), _item(2, b"b", received=2.0, priority=9), _item(3, b"c", received=3.0))
    assert backlog.oldest_arrival() == 2.0


def test_oldest_arrival_ignores_removed_and_sees_suspects() -> None:
    removed, suspect = _item(1, received=1.0), _item(2, received=2.0)
    backlog = _backlog(removed, _item(3, received=3.0))
    backlog.push_trials([[suspect]])
    backlog.remove(removed)
    assert backlog.oldest_arrival() == 2.0


def test_oldest_arrival_of_nothing_is_none() -> None:
    item = _item(1)
    backlog = _backlog(item)
    backlog.remove(item)
    assert backlog.oldest_arrival() is None


class _CountedItem(Item):
    """An item that counts how often anybody looks whether it waits."""

    __slots__ = ("_state",)
    num_looks = 0

    @property
    def state(self) -> ItemState:
        type(self).num_looks += 1
        return self._state

    @state.setter
    def state(self, state: ItemState) -> None:
        self._state = state


def _looks_of_asking_each_time(num_priorities: int) -> int:
    """How often items are looked at when each of as many priorities is popped and the oldest arrival asked for after each."""
    _CountedItem.num_looks = 0
    backlog = _backlog(*[_CountedItem(b"a", seq, b"", float(-seq), seq) for seq in range(num_priorities)])
    while backlog.pop():
        backlog.oldest_arrival()
    return _CountedItem.num_looks


def test_oldest_arrival_of_many_priorities_looks_at_each_item_a_few_times() -> None:
    assert _looks_of_asking_each_time(900) < 10 * 900


def test_oldest_arrival_does_not_keep_items_that_have_gone() -> None:
    backlog = _backlog(_item(0, priority=9))
    for seq in range(1, 5000):
        backlog.push(_item(seq, received=float(seq)))
        assert backlog.oldest_arrival() == 0.0
        Leases().grant(filter(None, [backlog.pop()]), 0, 0.0)
    assert backlog._arrivals is not None
    assert len(backlog._arrivals._heap) < 1000


def test_removed_items_behind_busier_levels_are_not_kept() -> None:
    backlog = _backlog(_item(0))
    for seq in range(1, 5000):
        late = _item(seq, priority=9)
        backlog.push(late)
        backlog.remove(late)
    assert sum(len(queue) for level in backlog._levels.values() for queue in level.queues.values()) < 1000
    assert _pop_all(backlog) == [0]

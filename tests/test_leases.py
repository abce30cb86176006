"""A lease number names one attempt, of one item, by one worker."""

from __future__ import annotations

import pytest

from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.leases import Leases
from enginepool.status import ItemState


def _items(count: int, sequences: int = 1) -> list[Item]:
    return [Item(b"client", seq, b"", 0.0, sequences=sequences) for seq in range(count)]


def test_grant_notes_the_attempt_on_the_item() -> None:
    (item,) = _items(1)
    numbers = Leases().grant([item], worker=3, now=7.0)
    assert [item.lease] == numbers
    assert (item.state, item.leased, item.last_worker, item.attempts) == (ItemState.LEASED, 7.0, 3, 1)


def test_grant_never_reuses_a_number() -> None:
    leases, items = Leases(), _items(3)
    seen: list[int] = []
    for worker in range(10):
        seen += leases.grant(items, worker, 0.0)
        leases.revoke(worker)
    assert len(set(seen)) == 30


def test_finish_returns_the_item_once() -> None:
    leases, (item,) = Leases(), _items(1)
    (number,) = leases.grant([item], 0, 0.0)
    assert leases.finish(number, 0) is item
    assert leases.finish(number, 0) is None
    assert len(leases) == 0


def test_finish_by_another_worker_finds_nothing() -> None:
    leases, (item, other) = Leases(), _items(2)
    (number,) = leases.grant([item], 0, 0.0)
    leases.grant([other], 1, 0.0)
    assert [leases.finish(number, worker) for worker in (1, 2)] == [None, None]
    assert item.state is ItemState.LEASED


def test_finish_of_an_older_attempt_finds_nothing() -> None:
    leases, (item,) = Leases(), _items(1)
    (old,) = leases.grant([item], 0, 0.0)
    leases.revoke(0)
    (new,) = leases.grant([item], 0, 1.0)
    assert leases.finish(old, 0) is None
    assert leases.finish(new, 0) is item


def test_sequences_counts_samples_not_items() -> None:
    leases = Leases()
    numbers = leases.grant(_items(2, sequences=4), 0, 0.0)
    assert (leases.in_hand(0), leases.sequences(0)) == (2, 8)
    leases.finish(numbers[0], 0)
    assert (leases.in_hand(0), leases.sequences(0)) == (1, 4)


def test_revoke_returns_items_in_order_and_clears_the_worker_only() -> None:
    leases, items = Leases(), _items(5)
    leases.grant(items[:3], 0, 0.0)
    leases.grant(items[3:], 1, 0.0)
    assert leases.revoke(0) == items[:3]
    assert (leases.in_hand(0), leases.sequences(0), leases.items_of(1), len(leases)) == (0, 0, items[3:], 2)


def test_revoke_of_an_idle_worker_is_empty() -> None:
    assert Leases().revoke(9) == []


@pytest.mark.parametrize("ending", ["finish", "revoke"])
def test_isolation_lasts_as_long_as_the_suspect(ending: str) -> None:
    leases = Leases()
    (number,) = leases.grant(_items(1), 0, 0.0, alone=True)
    assert leases.is_isolating(0)
    if ending == "finish":
        leases.finish(number, 0)
    else:
        leases.revoke(0)
    assert not leases.is_isolating(0)

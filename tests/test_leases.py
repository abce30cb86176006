"""A lease number names one attempt; a death convicts the killer alone, and never a neighbour."""

from __future__ import annotations

import pytest

from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.leases import Leases, judge
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


def test_judge_first_death_retries_everything() -> None:
    items = _items(3)
    verdict = judge(items)
    assert (verdict.retried, verdict.isolated, verdict.convicted) == (items, [], [])


def test_judge_first_death_alone_is_no_conviction() -> None:
    assert judge(_items(1)).convicted == []


def test_judge_second_death_in_company_isolates() -> None:
    items = _items(2)
    items[0].deaths = 1
    verdict = judge(items)
    assert (verdict.isolated, verdict.retried, verdict.convicted) == ([items[0]], [items[1]], [])


def test_judge_second_death_alone_convicts() -> None:
    (item,) = _items(1)
    item.deaths = 1
    assert judge([item]).convicted == [item]


def _run_until_settled(killers: set[int], count: int, hand: int) -> tuple[set[int], int]:
    """One worker that dies whenever a killer is in its hand; returns who was convicted and how often it died."""
    shared, isolated = _items(count), list[Item]()
    convicted: set[int] = set()
    deaths = 0
    while shared or isolated:
        group = [isolated.pop(0)] if isolated else [shared.pop(0) for _ in range(min(hand, len(shared)))]
        if killers.isdisjoint(item.seq for item in group):
            continue
        deaths += 1
        verdict = judge(group)
        shared = verdict.retried + shared
        isolated = verdict.isolated + isolated
        convicted |= {item.seq for item in verdict.convicted}
    return convicted, deaths


@pytest.mark.parametrize("hand", [1, 2, 16, 64])
@pytest.mark.parametrize("killer", [0, 7, 31])
def test_judge_convicts_the_killer_alone_within_three_deaths(killer: int, hand: int) -> None:
    convicted, deaths = _run_until_settled({killer}, 32, hand)
    assert convicted == {killer}
    assert deaths <= 3


def test_judge_convicts_every_one_of_several_killers() -> None:
    convicted, _ = _run_until_settled({3, 4, 20}, 32, 8)
    assert convicted == {3, 4, 20}

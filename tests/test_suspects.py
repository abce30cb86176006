"""A killer is told from its neighbours within few deaths, whatever it does, and deaths from outside convict nobody."""

from __future__ import annotations

import math
import random
import signal

import pytest

from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.suspects import Cause, Death, Verdict, cause_of, judge, quarters
from enginepool.dispatcher.vigil import Hang

EXITED = Death("exited with code 9")
KILLED = Death("was killed by SIGKILL", Cause.OUTSIDE)


def _items(count: int) -> list[Item]:
    items = [Item(b"client", seq, b"", 0.0) for seq in range(count)]
    for item in items:
        item.lease = item.seq + 1
    return items


def test_first_death_retries_everything() -> None:
    items = _items(3)
    verdict = judge(items, 0, EXITED, is_trial=False, num_workers=2)
    assert (verdict.retried, verdict.groups, verdict.convicted) == (items, [], [])


def test_second_death_in_company_suspects_those_of_both() -> None:
    items = _items(6)
    judge(items[:5], 0, EXITED, is_trial=False, num_workers=2)
    verdict = judge(items, 1, EXITED, is_trial=False, num_workers=2)
    assert (verdict.retried, verdict.groups, verdict.convicted) == ([items[5]], [items[0:2], items[2:4], [items[4]]], [])


def test_second_death_rather_suspects_who_was_new_in_both() -> None:
    items = _items(4)
    death = Death("exited with code 9", fresh={2, 3})
    judge(items, 0, death, is_trial=False, num_workers=2)
    verdict = judge(items, 1, Death("exited with code 9", fresh={3}), is_trial=False, num_workers=2)
    assert (verdict.groups, verdict.retried) == ([[items[2]]], [items[0], items[1], items[3]])


def test_third_death_suspects_an_old_hand_too() -> None:
    items = _items(2)
    for _ in range(2):
        judge(items[:1], 0, KILLED, is_trial=False, num_workers=2)
    items[1].deaths = items[1].fresh_deaths = 1
    verdict = judge(items, 0, Death("exited with code 9", fresh={2}), is_trial=False, num_workers=2)
    assert verdict.groups == [[items[0]], [items[1]]]


def test_group_on_trial_dies_and_its_quarters_are_next() -> None:
    items = _items(9)
    verdict = judge(items, 0, EXITED, is_trial=True, num_workers=2)
    assert (list(map(len, verdict.groups)), verdict.retried) == ([3, 3, 3], [])


@pytest.mark.parametrize("count", range(40))
def test_quarters_are_at_most_four_and_lose_nobody(count: int) -> None:
    items = _items(count)
    groups = quarters(items)
    assert [item for group in groups for item in group] == items
    assert len(groups) <= 4
    assert all(groups)


def test_death_in_an_admission_suspects_that_item_only() -> None:
    items = _items(3)
    verdict = judge(items, 0, Death("exited with code 9", admitting=2), is_trial=False, num_workers=2)
    assert (verdict.groups, verdict.retried, verdict.convicted) == ([[items[1]]], [items[0], items[2]], [])
    assert [item.deaths for item in items] == [0, 1, 0]
    assert judge([items[1]], 1, Death("exited with code 9", admitting=2), is_trial=True, num_workers=2).convicted == [items[1]]


def test_kill_in_an_admission_delays_nobody() -> None:
    items = _items(3)
    verdict = judge(items, 0, Death("was killed by SIGKILL", Cause.OUTSIDE, admitting=2), is_trial=False, num_workers=2)
    assert (set(verdict.retried), verdict.groups) == (set(items), [])


def test_admission_that_hangs_in_a_living_process_convicts_at_once() -> None:
    items = _items(2)
    verdict = judge(items, 0, Death("hangs", admitting=1, hangs_in_admission=True), is_trial=False, num_workers=2)
    assert (verdict.convicted, verdict.retried) == ([items[0]], [items[1]])


@pytest.mark.parametrize(
    ("code", "hang", "was_out_of_memory", "expected"),
    [
        pytest.param(-signal.SIGKILL, None, False, Cause.OUTSIDE, id="plain SIGKILL"),
        pytest.param(-signal.SIGKILL, None, True, Cause.INSIDE, id="out of memory"),
        pytest.param(-signal.SIGSEGV, None, False, Cause.INSIDE, id="SIGSEGV"),
        pytest.param(9, None, False, Cause.INSIDE, id="exit 9"),
        pytest.param(70, None, False, Cause.INSIDE, id="engine lost"),
        pytest.param(0, None, False, Cause.OUTSIDE, id="exit 0"),
        pytest.param(-signal.SIGKILL, Hang.STALL, False, Cause.INSIDE, id="killed for a stall"),
        pytest.param(-signal.SIGKILL, Hang.MUTE, False, Cause.OUTSIDE, id="killed for silence"),
    ],
)
def test_cause_of_an_exit(code: int, hang: Hang | None, was_out_of_memory: bool, expected: Cause) -> None:
    assert cause_of(code, hang, was_out_of_memory=was_out_of_memory) is expected


class Pool:
    """Workers that die of killers: what the dispatcher would do, step by step, with the deaths counted."""

    def __init__(self, num_items: int, hand: int, num_workers: int, cause: Cause = Cause.INSIDE, *, in_admission: bool = False) -> None:
        self.items = _items(num_items)
        self.shared = list(self.items)
        self.groups: list[list[Item]] = []
        self.hand, self.num_workers, self.cause, self.in_admission = hand, num_workers, cause, in_admission
        self.convicted: set[int] = set()
        self.finished: set[int] = set()
        self.num_deaths = 0

    def run(self, killers: set[int]) -> None:
        worker = 0
        while self.shared or self.groups:
            is_trial = bool(self.groups)
            group = self.groups.pop(0) if is_trial else self.shared[: self.hand]
            if not is_trial:
                del self.shared[: self.hand]
            guilty = [item for item in group if item.seq in killers]
            if not guilty:
                self.finished |= {item.seq for item in group}
                continue
            self.num_deaths += 1
            death = Death("died", self.cause, guilty[0].lease if self.in_admission else None)
            self._apply(judge(group, worker, death, is_trial=is_trial, num_workers=self.num_workers))
            worker = (worker + 1) % self.num_workers

    def _apply(self, verdict: Verdict) -> None:
        self.shared = verdict.retried + self.shared
        self.groups = verdict.groups + self.groups
        self.convicted |= {item.seq for item in verdict.convicted}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("hand", [1, 2, 5, 9, 20, 34, 40])
@pytest.mark.parametrize("killer", [0, 17, 39])
def test_late_killer_is_convicted_alone_within_two_and_log2_deaths(killer: int, hand: int, num_workers: int) -> None:
    pool = Pool(40, hand, num_workers)
    pool.run({killer})
    assert pool.convicted == {killer}
    assert len(pool.finished) == 39
    assert pool.num_deaths <= 2 + math.log2(40)


@pytest.mark.parametrize("hand", [1, 9, 40])
def test_late_killer_by_a_plain_sigkill_costs_one_more_at_most(hand: int) -> None:
    pool = Pool(40, hand, 2, Cause.OUTSIDE)
    pool.run({17})
    assert pool.convicted == {17}
    assert pool.num_deaths <= 2 + math.log2(40)


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("hand", [1, 9, 40])
def test_admission_killer_is_convicted_at_its_second_death(hand: int, cause: Cause) -> None:
    pool = Pool(40, hand, 2, cause, in_admission=True)
    pool.run({17})
    assert (pool.convicted, pool.num_deaths, len(pool.finished)) == ({17}, 2, 39)


def test_several_killers_are_all_found() -> None:
    pool = Pool(40, 20, 2)
    pool.run({3, 4, 25})
    assert (pool.convicted, len(pool.finished)) == ({3, 4, 25}, 37)


@pytest.mark.parametrize("admitting", [None, 1], ids=["later", "on admission"])
def test_broken_worker_convicts_nobody(admitting: int | None) -> None:
    """Worker 0 kills whatever it is given; each item that is tried there goes on elsewhere."""
    (item,) = _items(1)
    for is_trial in (False, True, True, True, True):
        verdict = judge([item], 0, Death("exited with code 9", admitting=admitting), is_trial=is_trial, num_workers=2)
        assert verdict.convicted == []


def test_lone_item_outlives_four_kills_from_outside() -> None:
    (item,) = _items(1)
    convicted = [judge([item], index % 2, KILLED, is_trial=index > 1, num_workers=2).convicted for index in range(5)]
    assert convicted == [[], [], [], [], [item]]


def test_the_only_worker_is_enough_to_convict() -> None:
    (item,) = _items(1)
    convicted = [judge([item], 0, EXITED, is_trial=is_trial, num_workers=1).convicted for is_trial in (False, False, True)]
    assert convicted == [[], [], [item]]


@pytest.mark.parametrize("seed", range(20))
def test_random_kills_convict_no_innocent(seed: int) -> None:
    """One in thirty of all runs is killed, trials included: far more than a pool could live with."""
    draw = random.Random(seed)
    shared, groups = _items(2000), list[list[Item]]()
    finished = 0
    while shared or groups:
        is_trial = bool(groups)
        group = groups.pop(0) if is_trial else [shared.pop(0) for _ in range(min(9, len(shared)))]
        if draw.random() > 1 / 30:
            finished += len(group)
            continue
        cause = draw.choice([Cause.OUTSIDE, Cause.OUTSIDE, Cause.INSIDE])
        fresh = [item.lease or 0 for item in group[-draw.randint(0, 2) :]]
        verdict = judge(group, draw.randrange(2), Death("died", cause, None, fresh), is_trial=is_trial, num_workers=2)
        assert verdict.convicted == []
        shared, groups = verdict.retried + shared, verdict.groups + groups
    assert finished == 2000

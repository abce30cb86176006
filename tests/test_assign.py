"""Who gets how much next: the pull rule keeps workers level, the batch rule waits for full batches or a timeout."""

from __future__ import annotations

import random

import msgspec
import pytest

from enginepool.dispatcher.assign import Assignment, BatchRule, WorkerLoad, assign_slice, assign_trial, reserve_for_trial, trial_workers


def _load(index: int, in_hand: int = 0, capacity: int = 4, prefetch: int = 2, *, is_isolating: bool = False) -> WorkerLoad:
    return WorkerLoad(index, capacity, prefetch, in_hand, is_isolating)


@pytest.mark.parametrize(
    ("loads", "waiting", "expected"),
    [
        pytest.param([_load(0), _load(1)], 0, None, id="nothing-waits"),
        pytest.param([], 5, None, id="no-workers"),
        pytest.param([_load(0, 6), _load(1, 7)], 5, None, id="all-full"),
        pytest.param([_load(0, is_isolating=True)], 5, None, id="isolating-worker-gets-nothing"),
        pytest.param([_load(0), _load(1)], 3, Assignment(0, 2), id="equal-share-of-a-short-backlog"),
        pytest.param([_load(0, 1), _load(1)], 1, Assignment(1, 1), id="emptiest-first"),
        pytest.param([_load(0, 1, capacity=2), _load(1, 3, capacity=8)], 9, Assignment(1, 5), id="level-is-a-share-of-capacity"),
        pytest.param([_load(0)], 100, Assignment(0, 4), id="running-slots-before-prefetch"),
        pytest.param([_load(0, 4)], 100, Assignment(0, 2), id="prefetch-when-all-run"),
        pytest.param([_load(0, 5)], 100, Assignment(0, 1), id="prefetch-is-bounded"),
        pytest.param([_load(0, capacity=64)], 100, Assignment(0, 32), id="slice-is-bounded"),
        pytest.param([_load(0, 6), _load(1)], 4, Assignment(1, 4), id="share-counts-open-workers-only"),
    ],
)
def test_assign_slice_decision(loads: list[WorkerLoad], waiting: int, expected: Assignment | None) -> None:
    assert assign_slice(loads, waiting, max_slice=32) == expected


@pytest.mark.parametrize("seed", range(20))
def test_assign_slice_repeated_fills_windows_and_prefetches_last(seed: int) -> None:
    draw = random.Random(seed)
    loads = [_load(index, draw.randint(0, 6), draw.randint(1, 8), draw.randint(0, 3)) for index in range(draw.randint(1, 5))]
    room, waiting = sum(load.free for load in loads), draw.randint(0, 40)
    left = waiting
    while chosen := assign_slice(loads, left, max_slice=3):
        load = loads[chosen.index]
        assert chosen.num_sequences <= load.free
        loads[chosen.index] = msgspec.structs.replace(load, in_hand=load.in_hand + chosen.num_sequences)
        left -= chosen.num_sequences
        is_prefetched = loads[chosen.index].in_hand > load.capacity
        assert not (is_prefetched and any(other.in_hand < other.capacity for other in loads))
    assert waiting - left == min(waiting, room)


@pytest.mark.parametrize(
    ("usable", "died_in", "expected"),
    [
        pytest.param([0, 1, 2], {0}, {1, 2}, id="not-where-they-have-died"),
        pytest.param([0, 1], {0, 1}, {0, 1}, id="anywhere-once-they-have-died-everywhere"),
        pytest.param([1], {0, 1}, {1}, id="the-only-one-left"),
    ],
)
def test_trial_workers_are_rather_others(usable: list[int], died_in: set[int], expected: set[int]) -> None:
    assert trial_workers(usable, died_in) == expected


@pytest.mark.parametrize(
    ("loads", "allowed", "expected"),
    [
        pytest.param([_load(0, 1), _load(1)], {0, 1}, 1, id="the-empty-one"),
        pytest.param([_load(0), _load(1, 1)], {1}, None, id="the-empty-one-is-not-allowed"),
        pytest.param([_load(0, 1), _load(1, 2)], {0, 1}, None, id="none-is-empty"),
        pytest.param([_load(0, 1, is_isolating=True), _load(1)], {0, 1}, None, id="half-of-the-workers-try-already"),
        pytest.param([_load(0, 1, is_isolating=True), _load(1), _load(2, 1), _load(3, 1)], {0, 1, 2, 3}, 1, id="less-than-half-do"),
        pytest.param([], {0}, None, id="no-workers"),
    ],
)
def test_assign_trial_takes_an_empty_worker_only(loads: list[WorkerLoad], allowed: set[int], expected: int | None) -> None:
    assert assign_trial(loads, allowed) == expected


@pytest.mark.parametrize(
    ("loads", "allowed", "expected"),
    [
        pytest.param([_load(0, 3), _load(1, 1)], {0, 1}, 1, id="the-emptiest"),
        pytest.param([_load(0, 3), _load(1, 1)], {0}, 0, id="the-emptiest-that-is-allowed"),
        pytest.param([_load(0, 3, is_isolating=True), _load(1, 1)], {0, 1}, None, id="one-tries-already"),
        pytest.param([_load(0, 3)], {0, 1}, None, id="another-is-to-come-back"),
        pytest.param([], {0}, None, id="no-workers"),
    ],
)
def test_reserve_for_trial_empties_one_worker(loads: list[WorkerLoad], allowed: set[int], expected: int | None) -> None:
    assert reserve_for_trial(loads, allowed) == expected


RULE = BatchRule(size=4, timeout_s=0.5)


@pytest.mark.parametrize(
    ("waiting", "now", "flush", "expected"),
    [
        pytest.param(4, 10.0, False, Assignment(1, 4), id="full-goes-at-once"),
        pytest.param(9, 10.0, False, Assignment(1, 4), id="more-than-full-goes-as-one-batch"),
        pytest.param(3, 10.4, False, None, id="partial-waits"),
        pytest.param(3, 10.5, False, Assignment(1, 4), id="partial-goes-at-the-timeout"),
        pytest.param(1, 10.0, True, Assignment(1, 4), id="flush-sends-partial"),
        pytest.param(0, 99.0, True, None, id="nothing-waits"),
    ],
)
def test_batch_rule_decision(waiting: int, now: float, flush: bool, expected: Assignment | None) -> None:
    loads = [_load(0, 1), _load(1)]
    assert RULE.assign(loads, waiting, 10.0, now, flush=flush) == expected


def test_batch_rule_gives_a_busy_worker_nothing() -> None:
    assert RULE.assign([_load(0, 1)], 100, 0.0, 99.0, flush=True) is None


def test_batch_rule_deadline_counts_from_the_oldest() -> None:
    assert RULE.next_deadline(10.0) == 10.5
    assert RULE.next_deadline(None) is None

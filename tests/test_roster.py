"""Worker states, restart budget and back-off, and the pool's state that follows from them."""

from __future__ import annotations

import math

import pytest

from enginepool.dispatcher.roster import MAX_BACKOFF_S, RestartBudget, Roster, Slot
from enginepool.status import Load, PoolState, WorkerState

STARTING, READY, BACKOFF = WorkerState.STARTING, WorkerState.READY, WorkerState.BACKOFF
FAILED, DRAINING, STOPPED = WorkerState.FAILED, WorkerState.DRAINING, WorkerState.STOPPED


def _slot(index: int = 0, *, max_restarts: int = 3, state: WorkerState = BACKOFF) -> Slot:
    slot = Slot(index, RestartBudget(max_restarts, 60.0, 0.1))
    slot.state = state
    return slot


def _roster(*states: WorkerState, min_ready: int | None = None) -> Roster:
    return Roster([_slot(index, state=state) for index, state in enumerate(states)], min_ready or len(states))


def test_budget_backoff_doubles() -> None:
    budget = RestartBudget(5, 60.0, 0.1)
    assert [budget.spend(float(now)) for now in range(5)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])


def test_budget_backoff_has_a_ceiling() -> None:
    budget = RestartBudget(50, 1000.0, 1.0)
    assert max(budget.spend(0.0) or 0.0 for _ in range(50)) == MAX_BACKOFF_S


def test_budget_is_spent_after_its_restarts() -> None:
    budget = RestartBudget(2, 60.0, 0.1)
    assert [budget.spend(0.0) is None for _ in range(3)] == [False, False, True]


def test_budget_of_zero_never_restarts() -> None:
    assert RestartBudget(0, 60.0, 0.1).spend(0.0) is None


def test_budget_is_not_spent_by_deaths_that_are_not_charged() -> None:
    budget = RestartBudget(1, 60.0, 0.1)
    waits = [budget.spend(0.0, is_charged=is_charged) for is_charged in (True, False, False)]
    assert waits == pytest.approx([0.1, 0.2, 0.4]), "they make the wait longer"
    assert budget.spend(0.0) is None


def test_budget_is_spent_by_failed_starts_however_long_they_take() -> None:
    budget = RestartBudget(2, 60.0, 0.1)
    assert [budget.spend(now) is None for now in (0.0, 600.0, 1200.0)] == [False, False, True]


def test_budget_counts_anew_after_a_good_start() -> None:
    budget = RestartBudget(1, 60.0, 0.1)
    budget.spend(0.0)
    budget.was_good()
    assert budget.spend(600.0) is not None
    assert budget.spend(1200.0) is None


@pytest.mark.parametrize("is_charged", [True, False])
def test_budget_refund_forgets_a_death_of_its_kind(is_charged: bool) -> None:
    budget = RestartBudget(1, 60.0, 0.1)
    budget.spend(0.0, is_charged=True)
    budget.spend(0.0, is_charged=False)
    budget.refund(is_charged=is_charged)
    assert (budget.spend(0.0) is None) is not is_charged


def test_budget_forgets_deaths_outside_the_window() -> None:
    budget = RestartBudget(1, 60.0, 0.1)
    assert budget.spend(0.0) == pytest.approx(0.1)
    budget.was_good()
    assert budget.spend(60.5) == pytest.approx(0.1)
    budget.was_good()
    assert budget.spend(61.0) is None


def test_slot_starting_has_a_deadline_that_signs_of_life_extend() -> None:
    slot = _slot()
    slot.started(123, now=10.0, start_timeout_s=5.0)
    assert (slot.state, slot.pid, slot.deadline, slot.restarts) == (STARTING, 123, 15.0, 0)
    slot.progressed(14.0, 5.0, "loading weights")
    assert (slot.deadline, slot.stage) == (19.0, "loading weights")
    slot.progressed(15.0, 5.0)
    assert (slot.deadline, slot.stage) == (20.0, "loading weights")


def test_slot_ready_has_no_start_deadline() -> None:
    slot = _slot()
    slot.started(1, 0.0, 5.0)
    slot.became_ready()
    slot.progressed(1.0, 5.0, "a late log line")
    assert (slot.state, slot.deadline, slot.stage) == (READY, math.inf, "ready")


def test_slot_death_backs_off_and_then_counts_a_restart() -> None:
    slot = _slot()
    slot.started(1, 0.0, 5.0)
    slot.became_ready()
    slot.died("was killed by SIGKILL", 100.0, is_permanent=False)
    assert (slot.state, slot.pid, slot.capacity, slot.last_exit) == (BACKOFF, None, 0, "was killed by SIGKILL")
    assert slot.start_at == pytest.approx(100.1)
    slot.started(2, 100.1, 5.0)
    assert slot.restarts == 1


def test_slot_permanent_death_fails_without_a_retry() -> None:
    slot = _slot()
    slot.started(1, 0.0, 5.0)
    slot.failure = "no such model"
    slot.died("exited with code 3", 1.0, is_permanent=True)
    assert (slot.state, slot.failure) == (FAILED, "no such model")


def test_slot_with_a_spent_budget_fails_and_says_why() -> None:
    slot = _slot(max_restarts=1)
    for now in (0.0, 1.0):
        slot.started(1, now, 5.0)
        slot.died("exited with code 9", now, is_permanent=False)
    assert (slot.state, slot.failure) == (FAILED, "exited with code 9")


def test_slot_exit_while_draining_is_no_death() -> None:
    slot = _slot(max_restarts=0)
    slot.started(1, 0.0, 5.0)
    slot.state = DRAINING
    slot.died("exited with code 0", 1.0, is_permanent=False)
    assert slot.state is STOPPED


def test_slot_restart_forgets_the_old_failure() -> None:
    slot = _slot()
    vars(slot).update(failure="cuda error", failure_kind="engine")
    slot.started(1, 0.0, 5.0)
    assert (slot.failure, slot.failure_kind) == (None, None)


def test_rates_are_tokens_over_the_last_seconds() -> None:
    slot = _slot()
    for second in range(11):
        slot.beat(Load(prompt_tokens=10 * second, generation_tokens=max(0, second - 5) * 100), float(second))
    assert slot.rates() == (10.0, 100.0)


def test_rates_need_two_beats_of_one_process() -> None:
    slot = _slot()
    slot.beat(Load(generation_tokens=500), 0.0)
    slot.beat(Load(generation_tokens=900), 1.0)
    slot.started(2, 2.0, 5.0)
    slot.beat(Load(generation_tokens=5), 3.0)
    assert slot.rates() == (0.0, 0.0)


def test_to_start_waits_for_the_backoff() -> None:
    roster = _roster(BACKOFF, BACKOFF, READY)
    roster.slots[0].start_at = 5.0
    assert [slot.index for slot in roster.to_start(4.9)] == [1]
    assert [slot.index for slot in roster.to_start(5.0)] == [0, 1]


def test_to_start_one_first_holds_the_rest_until_one_was_ready() -> None:
    roster = _roster(BACKOFF, BACKOFF)
    (first,) = roster.to_start(0.0, one_first=True)
    first.started(1, 0.0, 5.0)
    assert roster.to_start(0.0, one_first=True) == []
    first.became_ready()
    roster.settle()
    assert [slot.index for slot in roster.to_start(0.0, one_first=True)] == [1]


def test_overdue_are_silent_starters_only() -> None:
    roster = _roster(STARTING, STARTING, READY)
    for slot, deadline in zip(roster.slots, (5.0, 6.0, 1.0), strict=True):
        slot.deadline = deadline
    assert [slot.index for slot in roster.overdue(5.0)] == [0]


@pytest.mark.parametrize(
    ("states", "min_ready", "expected"),
    [
        pytest.param([STARTING, STARTING], 2, PoolState.STARTING, id="all-starting"),
        pytest.param([READY, STARTING], 1, PoolState.STARTING, id="enough-ready-but-one-still-starting"),
        pytest.param([READY, BACKOFF], 1, PoolState.STARTING, id="enough-ready-but-one-retries"),
        pytest.param([READY, READY], 2, PoolState.READY, id="all-ready"),
        pytest.param([READY, FAILED], 1, PoolState.DEGRADED, id="enough-ready-one-failed"),
        pytest.param([READY, FAILED], 2, PoolState.FAILED, id="too-few-can-become-ready"),
        pytest.param([STARTING, FAILED], 2, PoolState.FAILED, id="fails-before-the-rest-has-started"),
        pytest.param([STARTING, FAILED], 1, PoolState.STARTING, id="the-other-may-still-come"),
        pytest.param([FAILED, FAILED], 1, PoolState.FAILED, id="all-failed"),
        pytest.param([BACKOFF], 1, PoolState.STARTING, id="only-one-retries"),
    ],
)
def test_settle_before_the_pool_is_up(states: list[WorkerState], min_ready: int, expected: PoolState) -> None:
    roster = _roster(*states, min_ready=min_ready)
    assert roster.settle() is expected
    assert roster.is_up is (expected in (PoolState.READY, PoolState.DEGRADED))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([READY, READY], PoolState.READY, id="all-ready-again"),
        pytest.param([READY, BACKOFF], PoolState.DEGRADED, id="one-restarts"),
        pytest.param([READY, STARTING], PoolState.DEGRADED, id="one-starts"),
        pytest.param([BACKOFF, STARTING], PoolState.DEGRADED, id="none-ready-but-coming"),
        pytest.param([READY, FAILED], PoolState.DEGRADED, id="below-min-ready-goes-on"),
        pytest.param([FAILED, BACKOFF], PoolState.DEGRADED, id="one-given-up-one-restarts"),
        pytest.param([FAILED, FAILED], PoolState.FAILED, id="all-given-up"),
    ],
)
def test_settle_after_the_pool_was_up(states: list[WorkerState], expected: PoolState) -> None:
    roster = _roster(READY, READY)
    roster.settle()
    for slot, state in zip(roster.slots, states, strict=True):
        slot.state = state
    assert roster.settle() is expected


def test_settle_remembers_that_a_worker_was_ready() -> None:
    roster = _roster(READY, STARTING)
    roster.settle()
    roster.slots[0].state = BACKOFF
    roster.settle()
    assert roster.was_ready


def test_reasons_tell_equal_failures_once() -> None:
    roster = _roster(FAILED, FAILED, FAILED, READY)
    for slot, failure in zip(roster.slots, ["no model", "out of memory", "no model", "old"], strict=True):
        slot.failure = failure
    assert roster.reasons().splitlines() == ["worker 0, 2: no model", "worker 1: out of memory"]


def test_why_incomplete_names_deaths_failures_and_that_nobody_is_left() -> None:
    roster = _roster(READY, READY, READY)
    roster.settle()
    for slot, state in zip(roster.slots, (BACKOFF, STARTING, FAILED), strict=True):
        slot.state = state
    roster.slots[0].last_exit, roster.slots[1].last_exit = "was killed by SIGKILL", "exited with code 9"
    roster.slots[2].failure = "no model"
    assert roster.why_incomplete().splitlines() == [
        "no worker is ready, so items wait",
        "worker 0 is being started again: its last process was killed by SIGKILL",
        "worker 1 is being started again: its last process exited with code 9",
        "worker 2: no model",
    ]


def test_why_incomplete_is_empty_while_all_start_for_the_first_time_and_when_all_are_ready() -> None:
    assert [_roster(STARTING, BACKOFF).why_incomplete(), _roster(READY, READY).why_incomplete()] == ["", ""]


def test_absence_of_the_dispatcher_is_not_counted_against_a_start() -> None:
    slot = Slot(0, RestartBudget(1, 60.0, 0.1))
    roster = Roster([slot], 1)
    slot.started(7, 0.0, 10.0)
    roster.excuse(100.0)
    assert (roster.overdue(109.9), roster.overdue(110.0)) == ([], [slot])

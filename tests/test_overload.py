"""More work than there is room for: bounds by items and bytes hold, nobody is starved, deadlines end what waits too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_for

from enginepool import Code, EnginePoolWarning, Overloaded, Pool, SamplingParams
from enginepool.clock import monotonic

FIVE = SamplingParams(max_tokens=5)
ENDLESS = SamplingParams(max_tokens=10_000_000)
MAX_ITEMS = 40
MAX_BYTES = 100_000


@pytest.fixture
def pool() -> Iterator[Pool]:
    """One slow worker that runs two at once, and little room to wait."""
    script: dict[str, Any] = {"step_s": 0.001, "max_num_seqs": 2, "max_model_len": 10**6}
    with Pool(engine="echo", workers=1, max_backlog_items=MAX_ITEMS, max_backlog_bytes=MAX_BYTES, **script) as pool:
        yield pool
        pool.close(drain=False)


def _block(pool: Pool) -> None:
    """Keep the worker busy for ever: nothing else gets in (it holds one more than it runs)."""
    for _ in range(3):
        pool.submit("blocker", ENDLESS, priority=-1)
    wait_for(lambda: pool.status().in_flight == 3, "the blockers")


def _submit_until_refused(pool: Pool, prompt: str) -> int:
    """How many of this client's were taken."""
    futures = [pool.submit(prompt, FIVE) for _ in range(2 * MAX_ITEMS)]
    pool.status()  # answered after all refusals
    return sum(not future.done() for future in futures)


@pytest.mark.parametrize(
    ("size", "num_taken"),
    [pytest.param(10, MAX_ITEMS * 3 // 4, id="by items"), pytest.param(9_900, 7, id="by bytes")],
)
def test_backlog_takes_no_more_than_its_bounds(pool: Pool, size: int, num_taken: int) -> None:
    _block(pool)
    assert _submit_until_refused(pool, "x" * size) == num_taken
    status = pool.status()
    assert status.backlog == num_taken
    assert status.backlog_bytes <= MAX_BYTES * 3 // 4


def test_other_clients_get_in_where_one_has_taken_all_it_may(pool: Pool) -> None:
    _block(pool)
    _submit_until_refused(pool, "greedy")
    with Pool.connect(pool.endpoint) as other:
        futures = [other.submit("modest", FIVE) for _ in range(MAX_ITEMS // 4)]
        other.status()
        assert not any(future.done() for future in futures)
        assert type(other.submit("one too many", FIVE).exception(timeout=20)) is Overloaded
        other.close(drain=False)


def test_item_larger_than_the_whole_backlog_is_its_own_error_between_neighbours(pool: Pool) -> None:
    prompts = [*["small"] * 30, "x" * (MAX_BYTES + 1), *["small"] * 30]
    with pytest.warns(EnginePoolWarning, match="1 of 61 items failed"):
        outputs = pool.generate_many(prompts, FIVE)
    assert [output.index for output in outputs if not output.ok] == [30]
    error = outputs[30].error
    assert error is not None
    assert error.code is Code.INVALID_REQUEST
    assert "max_backlog_bytes" in error.message


def test_large_items_get_through_a_backlog_that_holds_few_of_them(pool: Pool) -> None:
    outputs = pool.generate_many(["x" * 40_000] * 30, FIVE)
    assert all(output.ok for output in outputs)


def test_waiting_items_end_at_their_deadline_and_make_room(pool: Pool) -> None:
    _block(pool)
    started = monotonic()
    futures = [pool.submit("late", FIVE, deadline_s=0.3) for _ in range(MAX_ITEMS * 3 // 4)]
    errors = [future.result(timeout=20).error for future in futures]
    assert 0.25 < monotonic() - started < 3.0
    assert {error.code for error in errors if error is not None} == {Code.DEADLINE_EXCEEDED}
    status = pool.status()
    assert (status.backlog, status.backlog_bytes, status.in_flight) == (0, 0, 3)
    assert _submit_until_refused(pool, "again") == MAX_ITEMS * 3 // 4


def test_urgent_item_of_a_client_overtakes_a_full_backlog_of_another(pool: Pool) -> None:
    with Pool.connect(pool.endpoint) as patient:
        waiting = [patient.submit(f"patient {index}", SamplingParams(max_tokens=40)) for index in range(MAX_ITEMS * 3 // 4)]
        urgent = pool.generate("urgent", FIVE, priority=-5)
        assert urgent.ok
        assert sum(future.done() for future in waiting) < MAX_ITEMS // 2
        assert all(future.result(timeout=20).ok for future in waiting)

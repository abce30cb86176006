"""A future ends once, whoever comes first; a waiter returns its output or raises why there is none."""

from __future__ import annotations

import pytest

from enginepool.client.futures import OutputFuture, Waiter
from enginepool.client.outputs import Output
from enginepool.clock import Timings
from enginepool.errors import Code, Draining, ItemError, Overloaded, PoolError, PoolLost
from enginepool.payload import CompletionOutput


def _output(code: Code | None = None) -> Output:
    samples = [] if code else [CompletionOutput(0, "text", [7], "stop")]
    return Output(
        index=0,
        request_id="0",
        prompt="p",
        prompt_token_ids=None,
        outputs=samples,
        timings=Timings(),
        error=ItemError(code, "why") if code else None,
    )


def test_future_resolves_to_the_output() -> None:
    future, output = OutputFuture(), _output()
    future.put(output)
    assert future.result(0) is output


def test_future_of_a_failed_item_resolves_too() -> None:
    future = OutputFuture()
    future.put(_output(code=Code.WORKER_LOST))
    assert not future.result(0).ok


def test_future_cancel_aborts_the_request() -> None:
    future, aborts = OutputFuture(), list[str]()
    future.on_cancel = lambda: aborts.append("abort")
    assert future.cancel()
    assert (aborts, future.cancelled()) == (["abort"], True)


def test_future_cancel_after_the_end_aborts_nothing() -> None:
    future, aborts = OutputFuture(), list[str]()
    future.on_cancel = lambda: aborts.append("abort")
    future.put(_output())
    assert not future.cancel()
    assert aborts == []


def test_future_cancelled_ignores_the_late_result() -> None:
    future = OutputFuture()
    future.cancel()
    future.put(_output())
    future.lose(PoolLost("gone"))
    assert future.cancelled()


def test_future_of_a_lost_pool_raises() -> None:
    future = OutputFuture()
    future.lose(PoolLost("gone"))
    with pytest.raises(PoolLost, match="gone"):
        future.result(0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(Code.OVERLOADED, Overloaded), (Code.DRAINING, Draining)],
    ids=["overloaded", "draining"],
)
def test_future_refused_by_the_pool_raises(code: Code, kind: type[PoolError]) -> None:
    future = OutputFuture()
    future.refuse(_output(code=code))
    with pytest.raises(kind, match="why"):
        future.result(0)


def test_future_refused_for_the_items_own_fault_resolves() -> None:
    future = OutputFuture()
    future.refuse(_output(code=Code.INVALID_REQUEST))
    error = future.result(0).error
    assert error is not None
    assert error.code is Code.INVALID_REQUEST


def test_waiter_returns_what_it_was_given() -> None:
    waiter, output = Waiter(), _output()
    waiter.put(output)
    assert waiter.wait() is output


@pytest.mark.parametrize(
    ("code", "kind"),
    [(Code.OVERLOADED, Overloaded), (Code.DRAINING, Draining)],
    ids=["overloaded", "draining"],
)
def test_waiter_refused_by_the_pool_raises(code: Code, kind: type[PoolError]) -> None:
    waiter = Waiter()
    waiter.refuse(_output(code=code))
    with pytest.raises(kind, match="why"):
        waiter.wait()


def test_waiter_of_a_lost_pool_raises() -> None:
    waiter = Waiter()
    waiter.lose(PoolLost("gone"))
    with pytest.raises(PoolLost, match="gone"):
        waiter.wait()

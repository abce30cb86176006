"""A future ends once, whoever comes first; a collector has one place an input and ignores what comes late."""

from __future__ import annotations

import threading

import pytest

from enginepool.client.futures import Collector, OutputFuture, Waiter
from enginepool.client.outputs import Output
from enginepool.clock import Timings
from enginepool.errors import Code, Draining, ItemError, Overloaded, PoolError, PoolLost
from enginepool.payload import CompletionOutput


def _output(index: int = 0, code: Code | None = None, *, num_tokens: int = 3) -> Output:
    samples = [] if code else [CompletionOutput(0, "text", [7] * num_tokens, "stop")]
    return Output(
        index=index,
        request_id=str(index),
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


def test_collector_keeps_input_order() -> None:
    collector = Collector(3)
    for index in (2, 0, 1):
        collector.put(_output(index))
    assert [output.index for output in collector.outputs if output] == [0, 1, 2]
    assert collector.is_done.is_set()


def test_collector_is_not_done_before_the_last() -> None:
    collector = Collector(2)
    collector.put(_output(1))
    assert (collector.num_left, collector.is_done.is_set()) == (1, False)


def test_collector_of_nothing_is_done() -> None:
    assert Collector(0).is_done.is_set()


def test_collector_takes_the_first_output_of_a_place() -> None:
    collector, first = Collector(2), _output(0)
    collector.put(first)
    collector.put(_output(0, Code.TIMEOUT))
    assert (collector.outputs[0], collector.num_left, collector.num_failed) == (first, 1, 0)


def test_collector_counts_tokens_and_failures() -> None:
    collector = Collector(3)
    collector.put(_output(0, num_tokens=5))
    collector.put(_output(1, num_tokens=7))
    collector.put(_output(2, Code.WORKER_LOST))
    assert (collector.num_tokens, collector.num_failed) == (12, 1)


def test_collector_keeps_overloaded_items_for_another_try() -> None:
    collector, refused = Collector(1), _output(0, Code.OVERLOADED)
    collector.refuse(refused)
    assert (collector.refused, collector.num_left) == ([refused], 1)


@pytest.mark.parametrize("code", [Code.DRAINING, Code.INVALID_REQUEST])
def test_collector_ends_items_refused_for_good(code: Code) -> None:
    collector = Collector(1)
    collector.refuse(_output(0, code))
    assert (collector.refused, collector.num_failed, collector.is_done.is_set()) == ([], 1, True)


def test_collector_of_a_lost_pool_is_done_with_the_error() -> None:
    collector, error = Collector(2), PoolLost("gone")
    collector.lose(error)
    assert (collector.error, collector.is_done.is_set()) == (error, True)


def test_collector_loses_no_refusal_and_no_count_between_two_threads() -> None:
    count = 20_000
    collector = Collector(count)

    def refuse() -> None:
        for index in range(0, count, 2):
            collector.refuse(_output(index, Code.OVERLOADED))

    def put() -> None:
        for index in range(1, count, 2):
            collector.put(_output(index))

    refuser, putter = threading.Thread(target=refuse), threading.Thread(target=put)
    refuser.start()
    putter.start()
    while not collector.is_done.is_set():
        for output in collector.take_refused():
            collector.put(_output(output.index))
    refuser.join()
    putter.join()
    assert [output.index for output in collector.outputs if output] == list(range(count))

"""A `*_many` call ends with one Output an input; its summary warns once, or the first failure is raised with the rest in hand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import pytest
from fake_connection import FakeConnection

from enginepool.client import flight as flight_module
from enginepool.client.calls import make_jobs
from enginepool.client.flight import Flight, Job
from enginepool.client.mailbox import ThreadMailbox
from enginepool.client.many import EnginePoolWarning, ManyCall, check_on_error, raise_first, warn_of
from enginepool.client.outputs import Output
from enginepool.client.progress import Progress, View, make_view
from enginepool.client.requests import EncodedParams, encode_prompt, encode_sampling
from enginepool.client.verbs import _drive
from enginepool.clock import Timings
from enginepool.errors import Code, InvalidRequest, ItemError, ItemFailed, PoolClosed, PoolLost
from enginepool.payload import CompletionOutput

DEFAULT_LENGTH = encode_sampling(None)
OWN_LENGTH = encode_sampling({"max_tokens": 64})


def _output(index: int, *, finish_reason: str = "stop", code: Code | None = None) -> Output:
    return Output(
        index=index,
        request_id=f"id-{index}",
        prompt="p",
        prompt_token_ids=None,
        outputs=[] if code else [CompletionOutput(0, "text", [1], finish_reason)],
        timings=Timings(),
        error=ItemError(code, f"why {index}") if code else None,
    )


def _jobs(*params: EncodedParams | ItemError) -> list[Job]:
    return [Job(index, "p", one) for index, one in enumerate(params)]


# What is told at the end.


def test_warn_of_a_good_call_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of([_output(0), _output(1)], _jobs(DEFAULT_LENGTH, DEFAULT_LENGTH), stacklevel=2)


def test_warn_of_failures_counts_kinds_and_tells_the_first() -> None:
    outputs = [_output(0), _output(1, code=Code.TIMEOUT), _output(2, code=Code.WORKER_LOST), _output(3, code=Code.WORKER_LOST)]
    told = r"3 of 4 items failed \(2 worker_lost, 1 timeout\); the first is item 1: timeout: why 1"
    with pytest.warns(EnginePoolWarning, match=told) as caught:
        warn_of(outputs, _jobs(*[OWN_LENGTH] * 4), stacklevel=2)
    assert len(caught) == 1


def test_warn_of_cut_outputs_where_nobody_set_a_length() -> None:
    outputs = [_output(0, finish_reason="length"), _output(1, finish_reason="length"), _output(2)]
    with pytest.warns(EnginePoolWarning, match="1 of 3 outputs were cut off at vLLM's default of 16 tokens; set max_tokens"):
        warn_of(outputs, _jobs(DEFAULT_LENGTH, OWN_LENGTH, DEFAULT_LENGTH), stacklevel=2)


def test_warn_of_both_is_one_warning() -> None:
    outputs = [_output(0, finish_reason="length"), _output(1, code=Code.TIMEOUT)]
    with pytest.warns(EnginePoolWarning, match="1 of 2 items failed.*; 1 of 2 outputs were cut off") as caught:
        warn_of(outputs, _jobs(DEFAULT_LENGTH, ItemError(Code.INVALID_REQUEST, "bad params")), stacklevel=2)
    assert len(caught) == 1


def test_warn_of_points_at_the_callers_line() -> None:
    with pytest.warns(EnginePoolWarning) as caught:
        warn_of([_output(0, code=Code.TIMEOUT)], _jobs(OWN_LENGTH), stacklevel=2)
    assert caught[0].filename == __file__


def test_raise_first_of_good_outputs_does_nothing() -> None:
    raise_first([_output(0), _output(1)])


def test_raise_first_carries_the_error_and_all_outputs() -> None:
    outputs = [_output(0), _output(1, code=Code.TIMEOUT), _output(2, code=Code.WORKER_LOST)]
    with pytest.raises(ItemFailed, match=r"item 1 \(id-1\): timeout: why 1") as caught:
        raise_first(outputs)
    assert caught.value.error.code is Code.TIMEOUT
    assert caught.value.outputs == outputs


# The call itself, on a connection that answers at once or when it is told to.


class Run:
    """One call on a fake connection."""

    def __init__(
        self, connection: FakeConnection, prompts: Sequence[Any], view: View | None = None, timeout_s: float | None = None
    ) -> None:
        self.view = view or make_view(len(prompts), False)
        self.mailbox = ThreadMailbox[Output]()
        jobs = make_jobs(prompts, None, None, 0, None)
        flight = Flight(connection.real, encode_prompt, self.mailbox)
        self.steps = ManyCall(flight, jobs, timeout_s, self.view).steps()

    def to_the_end(self) -> list[Output]:
        """Drive it as `generate_many` does."""
        return _drive(self.steps, self.mailbox)


def _run(connection: FakeConnection, prompts: Sequence[Any], timeout_s: float | None = None) -> list[Output]:
    return Run(connection, prompts, timeout_s=timeout_s).to_the_end()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "RETRY_S", 0.0)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
def test_call_returns_one_output_an_input_in_order(count: int) -> None:
    outputs = _run(FakeConnection(), [f"p{index}" for index in range(count)])
    assert [(output.index, output.text) for output in outputs] == [(index, f"text of p{index}") for index in range(count)]


def test_call_keeps_input_order_whatever_ends_first() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b", "c"])
    next(run.steps)
    for index in (2, 0, 1):
        connection.answer(index)
    assert [output.prompt for output in run.to_the_end()] == ["a", "b", "c"]


def test_call_is_not_over_before_the_last() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"])
    next(run.steps)
    connection.answer(1)
    assert next(run.steps)
    connection.answer(0)
    assert len(run.to_the_end()) == 2


def test_call_takes_the_first_output_of_a_place() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"])
    next(run.steps)
    twice = next(iter(connection.held.values()))
    connection.answer(0)
    twice.sink.put(twice.failed(ItemError(Code.TIMEOUT, "late"), connection.welcome.anchor, 0.0))
    assert next(run.steps)
    connection.answer(1)
    assert [output.ok for output in run.to_the_end()] == [True, True]


def test_call_with_a_bad_prompt_fails_that_item_alone() -> None:
    outputs = _run(FakeConnection(), ["good", "bad \ud800", [1, 2], None])
    assert [output.ok for output in outputs] == [True, False, True, False]


def test_call_tells_its_view_of_items_failures_and_tokens() -> None:
    told: list[Progress] = []
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b", None], make_view(3, told.append))
    next(run.steps)
    connection.answer(0)
    connection.answer(1, error=ItemError(Code.WORKER_LOST, "gone"))
    with run.view:
        run.to_the_end()
    assert [(seen.done, seen.total, seen.failed, seen.tokens) for seen in (told[0], told[-1])] == [(0, 3, 0, 0), (3, 3, 2, 1)]


def test_call_sends_overloaded_items_again_in_smaller_messages() -> None:
    connection = FakeConnection()
    connection.num_full = 3
    assert all(output.ok for output in _run(connection, ["p"] * 10))
    assert connection.sizes[0] == 10
    assert max(connection.sizes[1:]) < 10


def test_call_ends_items_refused_for_good() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"])
    next(run.steps)
    connection.refuse(0, error=ItemError(Code.DRAINING, "stopping"))
    connection.answer(1)
    outputs = run.to_the_end()
    assert [output.error.code if output.error else None for output in outputs] == [Code.DRAINING, None]
    assert connection.messages == [[0, 1]]


def test_call_at_its_timeout_ends_what_is_left_and_aborts_it() -> None:
    connection = FakeConnection(is_silent=True)
    outputs = _run(connection, ["a", "b"], timeout_s=0.01)
    assert [output.error.code for output in outputs if output.error] == [Code.TIMEOUT] * 2
    assert connection.aborted == [0, 1]
    assert [output.prompt for output in outputs] == ["a", "b"]


def test_call_at_its_timeout_ends_what_was_never_sent() -> None:
    connection = FakeConnection(is_silent=True, submit_window=1)
    outputs = _run(connection, ["a", "b", None], timeout_s=0.01)
    assert [output.error.code for output in outputs if output.error] == [Code.TIMEOUT] * 3
    assert connection.aborted == [0]


def test_call_at_its_timeout_keeps_what_has_finished_unseen() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"], timeout_s=0.2)
    wanted, _ = next(run.steps)
    connection.answer(0)
    assert wanted == 2, "one output does not wake the caller"
    assert [output.ok for output in run.to_the_end()] == [True, False]


def test_call_on_a_lost_pool_raises_with_what_had_finished() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"])
    next(run.steps)
    connection.answer(0)
    connection.lose(PoolLost("gone"))
    with pytest.raises(PoolLost, match=r"gone \(1 of 2 items had finished") as caught:
        run.to_the_end()
    assert [output.index for output in cast(list[Output], caught.value.outputs)] == [0]


def test_call_whose_pool_is_lost_while_it_sends_has_what_had_finished() -> None:
    connection = FakeConnection()
    connection.fails_with, connection.fails_after = PoolLost("gone"), 1
    with pytest.raises(PoolLost, match=r"gone \(64 of 100 items had finished") as caught:
        _run(connection, ["p"] * 100)
    assert len(caught.value.outputs) == 64


def test_call_on_a_closed_pool_raises_as_it_is() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a"])
    next(run.steps)
    connection.lose(PoolClosed("closed"))
    with pytest.raises(PoolClosed, match="closed"):
        run.to_the_end()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError], ids=["ctrl-c", "failing-progress"])
def test_call_that_is_interrupted_aborts_its_items(interrupt: type[BaseException]) -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"])
    next(run.steps)
    with pytest.raises(interrupt):
        run.steps.throw(interrupt())
    assert connection.aborted == [0, 1]


def test_call_that_is_closed_aborts_its_items() -> None:
    connection = FakeConnection(is_silent=True)
    run = Run(connection, ["a", "b"])
    next(run.steps)
    run.steps.close()
    assert connection.aborted == [0, 1]


def test_call_stays_within_the_items_of_one_message() -> None:
    connection = FakeConnection(max_items_per_message=16)
    assert all(output.ok for output in _run(connection, ["p"] * 100))
    assert max(connection.sizes) <= 16


def test_call_sends_many_overloaded_items_again_within_one_message() -> None:
    connection = FakeConnection(is_silent=True, max_items_per_message=100)
    run = Run(connection, ["p"] * 2000)
    next(run.steps)
    assert len(connection.held) == 2000
    connection.refuse()
    connection.is_silent = False
    assert all(output.ok for output in run.to_the_end())
    assert max(connection.sizes) <= 100


def test_call_gets_through_a_backlog_smaller_than_its_chunk() -> None:
    connection = FakeConnection(max_backlog_items=10)
    assert all(output.ok for output in _run(connection, ["p"] * 100))


def test_call_stays_within_the_submit_window() -> None:
    connection = FakeConnection(submit_window=8, is_silent=True)
    run = Run(connection, ["p"] * 100)
    seen = 0
    for wanted, _ in run.steps:
        seen = max(seen, len(connection.held))
        assert 1 <= wanted <= len(connection.held)
        connection.answer(*[ticket.index for ticket in list(connection.held.values())[:wanted]])
    assert seen == 8


@pytest.mark.parametrize("on_error", ["ignore", "", None])
def test_check_on_error_takes_two_words(on_error: Any) -> None:
    with pytest.raises(InvalidRequest, match="'return' or 'raise'"):
        check_on_error(on_error)

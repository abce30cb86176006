"""A `*_many` call ends with one Output an input; its summary warns once, or the first failure is raised with the rest in hand."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Sequence
from typing import Any, cast

import pytest

from enginepool.client import many
from enginepool.client.connection import Connection
from enginepool.client.many import EnginePoolWarning, ManyCall, raise_first, warn_of
from enginepool.client.outputs import Output
from enginepool.client.requests import encode_sampling
from enginepool.client.ticket import Ticket
from enginepool.clock import ClockAnchor, EngineStamps, Timings
from enginepool.errors import Code, ItemError, ItemFailed, PoolLost
from enginepool.payload import CompletionOutput, GenerateResult
from enginepool.protocol import Limits, ResultItem, SubmitItem, Welcome

ANCHOR = ClockAnchor(0.0, 0.0, 0.0)
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


# What is told at the end.


def test_warn_of_a_good_call_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of([_output(0), _output(1)], [DEFAULT_LENGTH] * 2, stacklevel=2)


def test_warn_of_failures_counts_kinds_and_tells_the_first() -> None:
    outputs = [_output(0), _output(1, code=Code.TIMEOUT), _output(2, code=Code.WORKER_LOST), _output(3, code=Code.WORKER_LOST)]
    told = r"3 of 4 items failed \(2 worker_lost, 1 timeout\); the first is item 1: timeout: why 1"
    with pytest.warns(EnginePoolWarning, match=told) as caught:
        warn_of(outputs, [OWN_LENGTH] * 4, stacklevel=2)
    assert len(caught) == 1


def test_warn_of_cut_outputs_where_nobody_set_a_length() -> None:
    outputs = [_output(0, finish_reason="length"), _output(1, finish_reason="length"), _output(2)]
    with pytest.warns(EnginePoolWarning, match="1 of 3 outputs were cut off at vLLM's default of 16 tokens; set max_tokens"):
        warn_of(outputs, [DEFAULT_LENGTH, OWN_LENGTH, DEFAULT_LENGTH], stacklevel=2)


def test_warn_of_both_is_one_warning() -> None:
    outputs = [_output(0, finish_reason="length"), _output(1, code=Code.TIMEOUT)]
    with pytest.warns(EnginePoolWarning, match="1 of 2 items failed.*; 1 of 2 outputs were cut off") as caught:
        warn_of(outputs, [DEFAULT_LENGTH, ItemError(Code.INVALID_REQUEST, "bad params")], stacklevel=2)
    assert len(caught) == 1


def test_warn_of_points_at_the_callers_line() -> None:
    with pytest.warns(EnginePoolWarning) as caught:
        warn_of([_output(0, code=Code.TIMEOUT)], [OWN_LENGTH], stacklevel=2)
    assert caught[0].filename == __file__


def test_raise_first_of_good_outputs_does_nothing() -> None:
    raise_first([_output(0), _output(1)])


def test_raise_first_carries_the_error_and_all_outputs() -> None:
    outputs = [_output(0), _output(1, code=Code.TIMEOUT), _output(2, code=Code.WORKER_LOST)]
    with pytest.raises(ItemFailed, match=r"item 1 \(id-1\): timeout: why 1") as caught:
        raise_first(outputs)
    assert caught.value.error.code is Code.TIMEOUT
    assert caught.value.outputs == outputs


# The call itself, on a connection that answers at once.


class FakeConnection:
    """A pool that answers inside `submit`, with limits like a real one's."""

    def __init__(self, *, max_items_per_message: int = 1024, max_backlog_items: int = 10_000, submit_window: int = 4096) -> None:
        limits = Limits(1 << 20, max_items_per_message)
        self.welcome = Welcome(1, "id", 1, "m", "ipc:///x", limits, submit_window, ANCHOR)
        self.changed = threading.Condition()
        self.num_pending = 0
        self.num_full = 0
        self.sizes: list[int] = []
        self.aborted: list[int] = []
        self.is_silent = False
        self._max_backlog_items = max_backlog_items
        self._seqs = itertools.count()

    def next_seq(self) -> int:
        return next(self._seqs)

    def call(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def give_up(self, seqs: list[int]) -> None:
        self.aborted += seqs

    def submit(self, tickets: Sequence[Ticket], items: list[SubmitItem], frames: Sequence[bytes]) -> None:
        assert len(self.sizes) < 1000, "the call sends the same items for ever"
        self.sizes.append(len(items))
        assert len(tickets) == len(items) == len(frames)
        if self.is_silent:
            return
        for ticket in tickets:
            if len(items) > self.welcome.limits.max_items_per_message:
                ticket.sink.refuse(ticket.failed(ItemError(Code.INVALID_REQUEST, "too many in one message"), ANCHOR, 0.0))
            elif self.num_full > 0 or len(items) > self._max_backlog_items:
                ticket.sink.refuse(ticket.failed(ItemError(Code.OVERLOADED, "full"), ANCHOR, 0.0))
            else:
                result = GenerateResult([CompletionOutput(0, f"text of {ticket.prompt}", [1], "stop")], EngineStamps())
                ticket.sink.put(ticket.finished(result, ResultItem(ticket.seq, 0, 1, 0.0, 0.0), ANCHOR, 0.0))
        self.num_full -= 1

    def abort(self, seqs: list[int]) -> None:
        self.aborted += seqs


def _call(connection: FakeConnection, prompts: Sequence[Any], *, timeout_s: float | None = None) -> ManyCall:
    count = len(prompts)
    params = [DEFAULT_LENGTH] * count
    return ManyCall(cast(Connection, connection), prompts, params, [None] * count, [0] * count, [None] * count, timeout_s)


@pytest.fixture(autouse=True)
def _no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "TICK_S", 0.0)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
def test_call_returns_one_output_an_input_in_order(count: int) -> None:
    outputs = _call(FakeConnection(), [f"p{index}" for index in range(count)]).run(progress=False)
    assert [(output.index, output.text) for output in outputs] == [(index, f"text of p{index}") for index in range(count)]


def test_call_with_a_bad_prompt_fails_that_item_alone() -> None:
    outputs = _call(FakeConnection(), ["good", "bad \ud800", [1, 2], None]).run(progress=False)
    assert [output.ok for output in outputs] == [True, False, True, False]


def test_call_sends_overloaded_items_again() -> None:
    connection = FakeConnection()
    connection.num_full = 3
    assert all(output.ok for output in _call(connection, ["p"] * 10).run(progress=True))
    assert connection.sizes[0] == 10
    assert max(connection.sizes[1:]) < 10


def test_call_at_its_timeout_ends_what_is_left_and_aborts_it() -> None:
    connection = FakeConnection()
    connection.is_silent = True
    outputs = _call(connection, ["a", "b"], timeout_s=0.01).run(progress=False)
    assert [output.error.code for output in outputs if output.error] == [Code.TIMEOUT] * 2
    assert connection.aborted == [0, 1]


def test_call_on_a_lost_pool_raises_with_what_had_finished() -> None:
    call = _call(FakeConnection(), ["a", "b"])
    call._collector.put(_output(0))
    call._collector.lose(PoolLost("gone"))
    with pytest.raises(PoolLost, match=r"gone \(1 of 2 items had finished") as caught:
        call.run(progress=False)
    assert len(caught.value.outputs) == 1


def test_call_stays_within_the_items_of_one_message() -> None:
    connection = FakeConnection(max_items_per_message=16)
    assert all(output.ok for output in _call(connection, ["p"] * 100).run(progress=False))


def test_call_sends_many_overloaded_items_again_within_one_message() -> None:
    connection = FakeConnection()
    call = _call(connection, ["p"] * 2000)
    call._todo.clear()
    for index in range(2000):
        call._collector.refuse(_output(index, code=Code.OVERLOADED))
    assert all(output.ok for output in call.run(progress=False))


def test_call_gets_through_a_backlog_smaller_than_its_chunk() -> None:
    connection = FakeConnection(max_backlog_items=10)
    assert all(output.ok for output in _call(connection, ["p"] * 100).run(progress=False))


def test_call_stays_within_the_submit_window() -> None:
    connection = FakeConnection(submit_window=8)
    _call(connection, ["p"] * 100).run(progress=False)
    assert max(connection.sizes) <= 8

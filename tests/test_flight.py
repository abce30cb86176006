"""A flight keeps within the window and the messages' size, sends refused items again in order, and hands out each end once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fake_connection import FakeConnection

from enginepool.client import flight as flight_module
from enginepool.client.calls import make_jobs
from enginepool.client.flight import CHUNK, LONGEST_WAIT_S, Flight, Inbox, Job
from enginepool.client.mailbox import ThreadMailbox
from enginepool.client.outputs import Output
from enginepool.client.requests import encode_prompt, encode_sampling
from enginepool.clock import Timings
from enginepool.errors import Code, ItemError, PoolLost

PARAMS = encode_sampling(None)
TIMEOUT = ItemError(Code.TIMEOUT, "too late")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "RETRY_S", 0.0)


def _flight(connection: FakeConnection) -> Flight:
    return Flight(connection.real, encode_prompt, ThreadMailbox[Output]())


def _jobs(count: int, first: int = 0) -> list[Job]:
    return [Job(index, f"p{index}", PARAMS) for index in range(first, first + count)]


def _indexes(outputs: Sequence[Output]) -> list[int]:
    return [output.index for output in outputs]


def _output(index: int, code: Code | None = None) -> Output:
    error = ItemError(code, "why") if code else None
    return Output(index=index, request_id="", prompt=None, prompt_token_ids=None, outputs=[], timings=Timings(), error=error)


# The inbox: the receiving thread's side.


def test_inbox_keeps_overloaded_items_for_another_try() -> None:
    mailbox = ThreadMailbox[Output]()
    inbox = Inbox(mailbox)
    inbox.refuse(_output(3, Code.OVERLOADED))
    assert (list(inbox.refused), mailbox.take()) == ([3], [])
    mailbox.wait(None)  # the refusal has woken the reader


@pytest.mark.parametrize("code", [Code.DRAINING, Code.INVALID_REQUEST])
def test_inbox_ends_items_refused_for_good(code: Code) -> None:
    inbox = Inbox(ThreadMailbox[Output]())
    inbox.refuse(_output(3, code))
    assert (list(inbox.refused), _indexes(inbox.mailbox.take())) == ([], [3])


def test_inbox_of_a_lost_pool_wakes_its_reader() -> None:
    mailbox, error = ThreadMailbox[Output](), PoolLost("gone")
    inbox = Inbox(mailbox)
    inbox.lose(error)
    mailbox.wait(None)
    assert inbox.error is error


def test_inbox_loses_no_refusal_and_no_end_between_threads() -> None:
    count = 20_000
    mailbox = ThreadMailbox[Output]()
    inbox = Inbox(mailbox)

    def refuse() -> None:
        for index in range(0, count, 2):
            inbox.refuse(_output(index, Code.OVERLOADED))

    def put() -> None:
        for index in range(1, count, 2):
            inbox.put(_output(index))

    threads = [threading.Thread(target=refuse), threading.Thread(target=put)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while len(seen) < count:
        mailbox.wait(None)
        seen += _indexes(mailbox.take())
        seen += [inbox.refused.popleft() for _ in range(len(inbox.refused))]
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(count))


# Sending and receiving.


def test_start_sends_one_message_and_advance_returns_each_end_once() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(3))
    assert (connection.messages, flight.num_open, flight.has_news) == ([[0, 1, 2]], 3, False)
    connection.answer(1)
    assert flight.has_news
    assert (_indexes(flight.advance()), flight.num_open) == ([1], 2)
    connection.answer()
    assert (_indexes(flight.advance()), flight.advance(), flight.num_open) == ([0, 2], [], 0)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        pytest.param(Job(1, "half \ud83d", PARAMS), "U+D83D", id="prompt"),
        pytest.param(Job(1, "p", ItemError(Code.INVALID_REQUEST, "bad params")), "bad params", id="params"),
        pytest.param(Job(1, "p", PARAMS, None, 1 << 40), "a priority is an integer of 32 bits", id="priority"),
        pytest.param(Job(1, "p", PARAMS, None, 0, float("nan")), "deadline_s is a finite number", id="deadline"),
    ],
)
def test_job_that_can_not_be_sent_ends_at_once_and_alone(job: Job, told: str) -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start([*_jobs(1), job, *_jobs(1, 2)])
    (output,) = flight.advance()
    assert (output.index, output.error and output.error.code) == (1, Code.INVALID_REQUEST)
    assert told in str(output.error)
    assert connection.messages == [[0, 2]]


def test_message_without_a_sendable_job_is_not_sent() -> None:
    connection = FakeConnection()
    flight = _flight(connection)
    flight.start([Job(0, None, PARAMS)])
    assert (connection.messages, _indexes(flight.advance())) == ([], [0])


def test_output_carries_the_callers_name_or_the_place() -> None:
    flight = _flight(FakeConnection())
    flight.start([Job(0, "a", PARAMS, "mine"), Job(1, {"prompt": "b"}, PARAMS)])
    assert [(output.request_id, output.prompt) for output in flight.advance()] == [("mine", "a"), ("1", "b")]


def test_output_of_a_bad_job_still_has_its_text() -> None:
    flight = _flight(FakeConnection())
    flight.start(make_jobs([{"prompt": "b", "image": 1}], None, None, 0, None))
    assert [output.prompt for output in flight.advance()] == ["b"]


# Window and chunks.


def test_room_is_the_window_less_what_is_pending_anywhere() -> None:
    connection = FakeConnection(submit_window=10, is_silent=True)
    mine, other = _flight(connection), _flight(connection)
    assert mine.room == 10
    other.start(_jobs(4))
    assert mine.room == 6
    mine.start(_jobs(6))
    assert (mine.room, other.room) == (0, 0)
    connection.answer()
    mine.advance()
    assert mine.room == 10


def test_chunk_never_exceeds_a_message_and_is_small_for_small_limits() -> None:
    assert _flight(FakeConnection()).chunk == CHUNK
    flight = _flight(FakeConnection(max_items_per_message=5))
    flight.start(_jobs(5))
    assert flight.chunk == 5


# A full backlog.


def test_refused_items_leave_no_room_until_they_were_sent_again() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(4))
    connection.refuse(2, 3)
    assert flight.room == 0
    flight.advance()
    assert connection.messages == [[0, 1, 2, 3]], "nothing goes beyond what the backlog took"
    assert flight.room == 0
    connection.answer(0)
    flight.advance()
    assert connection.messages[1:] == [[2, 3]], "an end makes room for its place and one more"
    assert flight.room == 0


def test_limit_shrinks_to_what_the_backlog_took_and_grows_with_each_end() -> None:
    connection = FakeConnection(is_silent=True, submit_window=100)
    flight = _flight(connection)
    flight.start(_jobs(50))
    connection.refuse(*range(10, 50))
    flight.advance()
    assert (len(connection.held), flight.chunk) == (10, CHUNK // 2)
    most = 0
    while flight.num_open:
        connection.answer(min(ticket.index for ticket in connection.held.values()))
        flight.advance()
        most = max(most, len(connection.held))
    assert most <= 50
    assert flight.room > 10, "it grows again"


def test_backlog_that_takes_nothing_is_asked_with_one_item_at_a_time() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(CHUNK))
    connection.refuse()
    for _ in range(8):
        connection.num_full = 1
        flight.advance()
    assert connection.sizes == [CHUNK, *[1] * 8]


def test_refused_items_are_sent_again_in_their_order() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(6))
    connection.refuse(5, 1, 3)
    connection.answer(0, 2, 4)
    for _ in range(6):
        flight.advance()
        connection.answer()
    assert [index for message in connection.messages[1:] for index in message] == [1, 3, 5]


def test_refused_items_go_before_those_that_were_not_sent_yet() -> None:
    connection = FakeConnection(is_silent=True, submit_window=4)
    flight = _flight(connection)
    flight.start(_jobs(4))
    connection.refuse(3)
    flight.advance()
    connection.answer(0)
    assert flight.room == 0
    flight.advance()
    assert connection.messages[1:] == [[3]]
    assert flight.room == 1


def test_refusal_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "RETRY_S", 60.0)
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(2))
    assert flight.retry_s == LONGEST_WAIT_S
    connection.refuse()
    flight.advance()
    assert len(connection.messages) == 1
    assert 0 < flight.retry_s <= 60.0


# Ends.


def test_end_of_a_sent_item_aborts_it_and_drops_what_still_comes() -> None:
    connection = FakeConnection(is_silent=True)
    flight, jobs = _flight(connection), _jobs(2)
    flight.start(jobs)
    (output,) = flight.end(jobs[:1], TIMEOUT)
    assert (output.index, output.error, output.prompt) == (0, TIMEOUT, "p0")
    assert (connection.aborted, flight.num_open) == ([0], 1)
    connection.answer()
    assert _indexes(flight.advance()) == [1]


def test_end_of_an_item_that_was_not_sent_has_its_name_and_text() -> None:
    connection = FakeConnection()
    (output,) = _flight(connection).end([Job(7, "late", PARAMS, "mine")], TIMEOUT)
    assert (output.index, output.request_id, output.prompt, output.error) == (7, "mine", "late", TIMEOUT)
    assert connection.aborted == []


def test_abort_gives_up_everything_that_is_open() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(3))
    connection.answer(1)
    flight.abort()
    assert (connection.aborted, connection.held, flight.num_open) == ([0, 2], {}, 0)
    flight.abort()
    assert connection.aborted == [0, 2]


def test_abort_of_refused_items_does_not_send_them_again() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(2))
    connection.refuse()
    flight.abort()
    flight.advance()
    assert len(connection.messages) == 1


def test_check_of_a_lost_pool_raises_and_what_has_ended_can_still_be_taken() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.check()
    flight.start(_jobs(2))
    connection.answer(0)
    connection.lose(PoolLost("gone"))
    with pytest.raises(PoolLost, match="gone"):
        flight.check()
    assert _indexes(flight.take()) == [0]


def test_pool_lost_while_refused_items_are_sent_again_hands_out_what_has_ended_first() -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(_jobs(3))
    connection.refuse(2)
    connection.answer(0, 1)
    connection.fails_with, connection.fails_after = PoolLost("gone"), 1
    assert _indexes(flight.advance()) == [0, 1]
    with pytest.raises(PoolLost, match="gone"):
        flight.advance()


@pytest.mark.parametrize("value", [[[1, 2]], [{"prompt_token_ids": [1]}], [(1, 2)]], ids=["list", "dict", "tuple"])
def test_token_ids_are_in_the_output_of_a_failed_item_too(value: list[Any]) -> None:
    connection = FakeConnection(is_silent=True)
    flight = _flight(connection)
    flight.start(make_jobs(value, None, None, 0, None))
    connection.answer(error=TIMEOUT)
    (output,) = flight.advance()
    assert output.prompt_token_ids is not None

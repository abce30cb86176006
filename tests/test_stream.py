"""A stream's deltas add up to its output, its end comes once, and whoever stops reading frees the engine."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from fake_connection import ANCHOR, FakeConnection

from enginepool import (
    Code,
    Delta,
    Draining,
    ForkedPool,
    InvalidRequest,
    ItemError,
    Output,
    Overloaded,
    Pool,
    PoolClosed,
    PoolLost,
    SamplingParams,
)
from enginepool.client.calls import Single
from enginepool.client.mailbox import ThreadMailbox
from enginepool.client.requests import encode_prompt
from enginepool.client.stream import Stream, StreamEnd, Transcript
from enginepool.client.ticket import Ticket
from enginepool.clock import Timings
from enginepool.payload import CompletionOutput, GenerateResult, Logprob
from enginepool.protocol import ResultItem

FIVE = SamplingParams(max_tokens=5)
ENDLESS = SamplingParams(max_tokens=400_000)
LOST = ItemError(Code.WORKER_LOST, "worker 0 died")


def _part(text: str, *ids: int, index: int = 0, finish: str | None = None, total: float | None = None) -> CompletionOutput:
    logprobs = [{token: Logprob(-0.5, 1, chr(token))} for token in ids]
    return CompletionOutput(index, text, list(ids), finish, None, total, list(logprobs) if ids else None)


def _output(*samples: CompletionOutput, error: ItemError | None = None) -> Output:
    return Output(index=0, request_id="0", prompt="p", prompt_token_ids=None, outputs=list(samples), timings=Timings(), error=error)


# Putting samples together.


def test_transcript_adds_up_texts_tokens_and_logprobs() -> None:
    transcript = Transcript()
    transcript.add([_part("He", 1, 2, total=-1.0)])
    transcript.add([_part("llo", 3, total=-1.5)])
    transcript.add([_part("!", 4, finish="stop", total=-2.0)])
    (sample,) = transcript.samples()
    assert (sample.text, sample.token_ids, sample.finish_reason, sample.cumulative_logprob) == ("Hello!", [1, 2, 3, 4], "stop", -2.0)
    assert sample.logprobs is not None
    assert [next(iter(entry)) for entry in sample.logprobs if entry] == [1, 2, 3, 4]


def test_transcript_returns_the_parts_as_deltas() -> None:
    part = CompletionOutput(1, "x", [7], "stop", 50, -1.0, [{7: Logprob(-1.0)}])
    (delta,) = Transcript().add([part])
    assert delta == Delta(1, "x", [7], [{7: Logprob(-1.0)}], "stop", 50)


def test_transcript_keeps_interleaved_samples_apart_and_in_order() -> None:
    transcript = Transcript()
    transcript.add([_part("c", 3, index=2), _part("a", 1, index=0)])
    transcript.add([_part("b", 2, index=1, finish="length")])
    transcript.add([_part("A", 4, index=0, finish="stop"), _part("C", 5, index=2, finish="stop")])
    assert [(sample.index, sample.text, sample.finish_reason) for sample in transcript.samples()] == [
        (0, "aA", "stop"),
        (1, "b", "length"),
        (2, "cC", "stop"),
    ]


def test_transcript_takes_tokens_that_are_half_a_character() -> None:
    transcript = Transcript()
    deltas = transcript.add([_part("", 1), _part("é", 2)])
    assert [delta.text for delta in deltas] == ["", "é"]
    assert (transcript.samples()[0].text, transcript.samples()[0].token_ids) == ("é", [1, 2])


def test_transcript_without_logprobs_has_none() -> None:
    transcript = Transcript()
    transcript.add([CompletionOutput(0, "a", [1])])
    (sample,) = transcript.samples()
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)


def test_transcript_leaves_the_parts_alone() -> None:
    transcript, first = Transcript(), _part("a", 1)
    (delta,) = transcript.add([first])
    transcript.add([_part("b", 2)])
    assert (first.token_ids, delta.token_ids) == ([1], [1])


def _splits(draw: random.Random, whole: list[CompletionOutput]) -> Iterator[list[CompletionOutput]]:
    """The tokens of all samples, cut anywhere, samples in any turns; each sample's last part tells how it ended."""
    left = {sample.index: 0 for sample in whole}
    while any(left[sample.index] < len(sample.token_ids) for sample in whole):
        parts = []
        for sample in draw.sample(whole, draw.randint(1, len(whole))):
            start = left[sample.index]
            stop = min(len(sample.token_ids), start + draw.randint(1, 4))
            if start == stop:
                continue
            left[sample.index] = stop
            is_last = stop == len(sample.token_ids)
            assert sample.logprobs is not None
            parts.append(
                CompletionOutput(
                    sample.index,
                    sample.text[start:stop],
                    sample.token_ids[start:stop],
                    sample.finish_reason if is_last else None,
                    sample.stop_reason if is_last else None,
                    -0.5 * stop,
                    sample.logprobs[start:stop],
                )
            )
        if parts:
            yield parts


@pytest.mark.parametrize("seed", range(25))
def test_transcript_of_any_split_is_the_same_whole(seed: int) -> None:
    draw = random.Random(seed)
    whole = []
    for index in range(draw.randint(1, 4)):
        text = "".join(draw.choice("abcdé日🎉 \n") for _ in range(draw.randint(1, 30)))
        ids = [draw.randrange(1000) for _ in text]
        logprobs = [{token: Logprob(-0.5)} for token in ids]
        whole.append(CompletionOutput(index, text, ids, draw.choice(["stop", "length"]), None, -0.5 * len(ids), list(logprobs)))
    end, pieces = StreamEnd(ThreadMailbox[Delta]()), list(_splits(draw, whole))
    for parts in pieces[:-1]:
        end.add(parts)
    end.put(_output(*pieces[-1]))
    deltas = end.mailbox.take()
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].output is not None
    assert deltas[-1].output.outputs == whole
    for sample in whole:
        assert "".join(delta.text for delta in deltas if delta.index == sample.index) == sample.text


# The end, told once.


def test_end_with_a_result_carries_what_came_before_too() -> None:
    end = StreamEnd(ThreadMailbox[Delta]())
    end.add([_part("He", 1)])
    end.put(_output(_part("llo", 2, finish="stop")))
    first, last = end.mailbox.take()
    assert (first.text, first.output, last.text, last.finish_reason) == ("He", None, "llo", "stop")
    assert last.output is not None
    assert (last.output.text, last.output.token_ids, last.output.ok) == ("Hello", [1, 2], True)


def test_end_with_an_error_keeps_the_text_so_far() -> None:
    end = StreamEnd(ThreadMailbox[Delta]())
    end.add([_part("so f", 1)])
    end.add([_part("ar", 2)])
    end.put(_output(error=LOST))
    *_, last = end.mailbox.take()
    assert (last.text, last.output and last.output.error, last.output and last.output.text) == ("", LOST, "so far")
    assert last.output is not None
    assert last.output.finish_reason == "error"


def test_end_with_an_error_before_anything_came_has_no_text() -> None:
    end = StreamEnd(ThreadMailbox[Delta]())
    end.put(_output(error=LOST))
    (last,) = end.mailbox.take()
    assert last.output is not None
    assert (last.output.outputs, last.output.text) == ([], None)


def test_end_comes_once_and_nothing_after_it() -> None:
    end = StreamEnd(ThreadMailbox[Delta]())
    end.put(_output(_part("a", 1, finish="stop")))
    end.put(_output(error=LOST))
    end.add([_part("late", 2)])
    (last,) = end.mailbox.take()
    assert last.output is not None
    assert (last.output.ok, last.output.text) == (True, "a")


def test_end_of_several_samples_is_in_the_last_delta_alone() -> None:
    end = StreamEnd(ThreadMailbox[Delta]())
    end.put(_output(_part("a", 1, index=0, finish="stop"), _part("b", 2, index=1, finish="stop")))
    first, last = end.mailbox.take()
    assert (first.index, first.output, last.index) == (0, None, 1)
    assert last.output is not None
    assert [sample.text for sample in last.output.outputs] == ["a", "b"]


@pytest.mark.parametrize(("code", "kind"), [(Code.OVERLOADED, Overloaded), (Code.DRAINING, Draining)])
def test_end_of_a_stream_the_pool_did_not_take_raises(code: Code, kind: type[Exception]) -> None:
    stream, connection = _stream()
    connection.refuse(error=ItemError(code, "why"))
    with pytest.raises(kind, match="why"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_end_of_a_stream_refused_for_its_own_fault_is_its_output() -> None:
    stream, connection = _stream()
    connection.refuse(error=ItemError(Code.INVALID_REQUEST, "why"))
    (last,) = stream
    assert last.output is not None
    assert not last.output.ok


# Reading, on a connection without a pool.


def _stream(timeout_s: float | None = None) -> tuple[Stream, FakeConnection]:
    connection = FakeConnection(is_silent=True)
    end = StreamEnd(ThreadMailbox[Delta]())
    ticket = Single(encode_prompt, "p", FIVE).send(connection.real, end, end)
    return Stream(connection.real, ticket, end, timeout_s), connection


def _held(connection: FakeConnection) -> Ticket:
    (ticket,) = connection.held.values()
    return ticket


def _say(connection: FakeConnection, text: str) -> None:
    ticket = _held(connection)
    assert ticket.stream is not None
    ticket.stream.add([_part(text, *text.encode())])


def test_stream_yields_what_came_and_has_its_output_afterwards() -> None:
    stream, connection = _stream()
    _say(connection, "He")
    assert (next(stream).text, stream.output) == ("He", None)
    _say(connection, "ll")
    ticket = _held(connection)
    ticket.sink.put(ticket.finished(GenerateResult([_part("o", 111, finish="stop")]), ResultItem(0, 0, 1, 0.0, 0.0), ANCHOR, 0.0))
    assert [delta.text for delta in stream] == ["ll", "o"]
    assert stream.output is not None
    assert (stream.output.text, stream.output.worker) == ("Hello", 0)
    assert list(stream) == []


def test_stream_is_over_at_its_first_end_even_if_a_second_lies_there() -> None:
    stream, connection = _stream()
    ticket = _held(connection)
    connection.answer()
    stream._end.mailbox.push(Delta(output=ticket.failed(LOST, ANCHOR, 0.0)))
    assert len(list(stream)) == 1
    assert stream.output is not None
    assert stream.output.ok


def test_stream_at_its_time_limit_ends_with_the_text_so_far_and_aborts() -> None:
    stream, connection = _stream(timeout_s=0.05)
    _say(connection, "part")
    deltas = list(stream)
    assert [delta.text for delta in deltas] == ["part", ""]
    assert stream.output is not None
    assert (stream.output.error and stream.output.error.code, stream.output.text) == (Code.TIMEOUT, "part")
    assert len(connection.aborted) == 1


@pytest.mark.parametrize("leave", ["close", "with", "loop", "del", "cycle"])
def test_stream_that_is_left_aborts_its_item_once(leave: str) -> None:
    stream, connection = _stream()
    _say(connection, "part")
    next(stream)
    if leave == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif leave == "with":
        with stream:
            pass
    elif leave == "loop":
        _say(connection, "more")
        for _ in stream:
            break
    elif leave == "cycle":
        gc.disable()
        stream.myself = stream  # type: ignore[attr-defined]
        del stream
        assert connection.aborted == []
        gc.enable()
        gc.collect()
    else:
        del stream
    assert len(connection.aborted) == 1
    assert connection.held == {}


def test_stream_that_ended_aborts_nothing_when_it_goes() -> None:
    stream, connection = _stream()
    connection.answer()
    list(stream)
    stream.close()
    del stream
    assert connection.aborted == []


@pytest.mark.parametrize("error", [PoolLost("gone"), PoolClosed("closed")], ids=["lost", "closed"])
def test_stream_of_a_pool_that_goes_yields_what_came_and_raises(error: PoolLost | PoolClosed) -> None:
    stream, connection = _stream()
    _say(connection, "part")
    connection.lose(error)
    assert next(stream).text == "part"
    with pytest.raises(type(error)):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_stream_of_a_pool_that_goes_right_after_its_end_still_yields_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, connection = _stream()
    take = stream._end.mailbox.take

    def just_before() -> list[Delta]:
        taken = take()
        connection.answer()
        stream._end.lose(PoolLost("gone"))
        return taken

    monkeypatch.setattr(stream._end.mailbox, "take", just_before)
    (last,) = stream
    assert last.output is not None
    assert last.output.ok


def test_stream_read_on_the_receiving_thread_is_refused() -> None:
    stream, connection = _stream()
    connection.is_own_thread = True
    with pytest.raises(InvalidRequest, match="callback must not wait for a stream"):
        next(stream)


# On a real pool.


def _text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def _is_idle(pool: Pool) -> bool:
    status = pool.status()
    return status.in_flight == status.backlog == 0


def test_deltas_add_up_to_the_output(echo_pool: Pool) -> None:
    stream = echo_pool.stream("hello ", SamplingParams(max_tokens=20), request_id="mine")
    deltas = list(stream)
    assert len(deltas) == 20
    assert stream.output is deltas[-1].output
    assert stream.output is not None
    assert (stream.output.text, stream.output.request_id, stream.output.prompt) == ("hello hello hello he", "mine", "hello ")
    assert _text(deltas) == stream.output.text
    assert [token for delta in deltas for token in delta.token_ids] == stream.output.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]


def test_stream_of_several_samples_interleaves_them(echo_pool: Pool) -> None:
    stream = echo_pool.stream("abc", SamplingParams(max_tokens=6, n=2))
    deltas = list(stream)
    assert stream.output is not None
    assert [sample.text for sample in stream.output.outputs] == ["abcabc", "abcabc"]
    assert (_text(deltas, 0), _text(deltas, 1)) == ("abcabc", "abcabc")
    assert sum(delta.output is not None for delta in deltas) == 1


def test_stream_has_timings_and_usage_like_any_output(echo_pool: Pool) -> None:
    stream = echo_pool.stream("abc", FIVE)
    list(stream)
    assert stream.output is not None
    timings = stream.output.timings
    assert (stream.output.usage.prompt_tokens, stream.output.usage.completion_tokens) == (3, 5)
    assert (timings.first_token or 0) < (timings.last_token or 0) <= (timings.delivered or 0)


def test_streams_beside_whole_requests_in_one_engine() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, max_num_seqs=8) as pool:
        futures = [pool.submit(f"whole {index}", SamplingParams(max_tokens=30)) for index in range(4)]
        streams = [pool.stream(f"stream {index}", SamplingParams(max_tokens=30)) for index in range(3)]
        texts = [_text(list(stream)) for stream in streams]
        wholes = [future.result(timeout=20).text for future in futures]
    assert texts == [(f"stream {index}" * 5)[:30] for index in range(3)]
    assert wholes == [(f"whole {index}" * 5)[:30] for index in range(4)]


@pytest.mark.parametrize("prompt", ["", None, "x" * 600, "half \ud83d"], ids=["empty", "none", "too long", "surrogate"])
def test_stream_of_a_bad_item_is_one_delta_with_its_error(echo_pool: Pool, prompt: Any) -> None:
    (last,) = echo_pool.stream(prompt, FIVE)
    assert last.output is not None
    assert (last.output.ok, last.output.text) == (False, None)


def test_leaving_a_loop_early_aborts_within_a_step(echo_pool: Pool) -> None:
    neighbour = echo_pool.submit("neighbour", SamplingParams(max_tokens=50))
    for number, _ in enumerate(echo_pool.stream("endless", ENDLESS)):
        if number == 3:
            break
    wait_for(lambda: _is_idle(echo_pool), "the abort")
    assert neighbour.result(timeout=20).ok


def test_with_block_and_close_abort_what_is_not_finished(echo_pool: Pool) -> None:
    with echo_pool.stream("endless", ENDLESS) as stream:
        assert next(stream).text == "e"
    kept = echo_pool.stream("endless", ENDLESS)
    assert next(kept).text == "e"
    wait_for(lambda: echo_pool.status().in_flight == 1, "the abort of the first alone")
    kept.close()
    wait_for(lambda: _is_idle(echo_pool), "the abort of the second")
    assert list(kept) == []
    assert kept.output is None


def test_stream_in_a_garbage_cycle_aborts_its_item(echo_pool: Pool) -> None:
    stream = echo_pool.stream("endless", ENDLESS)
    next(stream)
    stream.myself = stream  # type: ignore[attr-defined]
    del stream
    gc.collect()
    wait_for(lambda: _is_idle(echo_pool), "the abort")


def test_streams_collected_while_others_send_lose_and_block_nothing(echo_pool: Pool) -> None:
    """Finalizers run wherever an allocation happens, in the middle of another thread's send too."""

    def litter() -> None:
        for _ in range(60):
            stream = echo_pool.stream("endless", ENDLESS)
            stream.myself = stream  # type: ignore[attr-defined]

    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    thread = threading.Thread(target=litter)
    thread.start()
    try:
        outputs = [output for _, output in echo_pool.iter_many((f"p{number}" for number in range(300)), FIVE)]
    finally:
        thread.join()
        gc.set_threshold(*before)
    assert len(outputs) == 300
    gc.collect()
    wait_for(lambda: _is_idle(echo_pool), "the abort of all that was dropped")


def test_stream_at_its_time_limit_has_its_partial_text(echo_pool: Pool) -> None:
    stream = echo_pool.stream("endless ", ENDLESS, timeout_s=0.3)
    deltas = list(stream)
    assert stream.output is not None
    assert stream.output.error is not None
    assert stream.output.error.code is Code.TIMEOUT
    assert stream.output.text == _text(deltas)
    assert str(stream.output.text).startswith("endless e")
    wait_for(lambda: _is_idle(echo_pool), "the abort")


def test_stream_at_its_deadline_has_its_partial_text(echo_pool: Pool) -> None:
    stream = echo_pool.stream("endless ", ENDLESS, deadline_s=0.3)
    deltas = list(stream)
    assert stream.output is not None
    assert stream.output.error is not None
    assert stream.output.error.code is Code.DEADLINE_EXCEEDED
    assert stream.output.text == _text(deltas)
    assert str(stream.output.text).startswith("endless e")


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "soon"])
def test_stream_with_a_senseless_time_limit_is_refused(echo_pool: Pool, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        echo_pool.stream("x", FIVE, timeout_s=timeout_s)


def test_stream_that_nobody_reads_holds_nobody_up(echo_pool: Pool) -> None:
    unread = echo_pool.stream("unread", SamplingParams(max_tokens=300))
    outputs = echo_pool.generate_many([f"other {index}" for index in range(50)], FIVE)
    assert all(output.ok for output in outputs)
    wait_for(lambda: _is_idle(echo_pool), "the end of the unread stream")
    assert _text(list(unread)) == ("unread" * 50)[:300]


def test_stream_inside_a_callback_can_be_started_but_not_read(echo_pool: Pool) -> None:
    told: list[Any] = []

    def callback(_: object) -> None:
        stream = echo_pool.stream("later", FIVE)
        with pytest.raises(InvalidRequest, match="callback"):
            next(stream)
        told.append(stream)

    echo_pool.submit("first", FIVE).add_done_callback(callback)
    wait_for(lambda: told, "the callback")
    assert _text(list(told[0])) == "later"


def test_stream_in_static_mode_tells_as_it_goes() -> None:
    with Pool(engine="echo", workers=1, step_s=0.005, batch_size=2, batch_timeout_s=0.02) as pool:
        stream = pool.stream("abc", SamplingParams(max_tokens=10))
        neighbour = pool.submit("neighbour", SamplingParams(max_tokens=200))
        first = next(stream)
        assert (first.text, neighbour.done()) == ("a", False)
        deltas = [first, *stream]
        assert neighbour.result(timeout=20).ok
    assert _text(deltas) == "abcabcabca"


@pytest.mark.parametrize("at", [0, 1], ids=["on admission", "in its first step"])
def test_death_before_the_first_delta_is_not_noticed(tmp_path: Path, at: int) -> None:
    extra = {"fault": "exit", "at": at, "once": str(tmp_path / "happened")}
    with Pool(engine="echo", workers=1, step_s=0.001) as pool:
        stream = pool.stream("abc", SamplingParams(max_tokens=6, extra_args=extra))
        deltas = list(stream)
    assert stream.output is not None
    assert (stream.output.ok, stream.output.attempts, _text(deltas)) == (True, 2, "abcabc")


def test_death_within_a_stream_ends_it_with_its_partial_text_and_spares_its_neighbours(tmp_path: Path) -> None:
    extra = {"fault": "exit", "at": 40, "once": str(tmp_path / "happened")}
    with Pool(engine="echo", workers=2, step_s=0.002, max_num_seqs=8) as pool:
        stream = pool.stream("abc", SamplingParams(max_tokens=80, extra_args=extra))
        next(stream)
        others = [pool.submit(f"other {index}", SamplingParams(max_tokens=80)) for index in range(6)]
        deltas = list(stream)
        outputs = [other.result(timeout=30) for other in others]
        assert pool.generate("and on", FIVE).ok
    assert stream.output is not None
    assert stream.output.error is not None
    assert stream.output.error.code is Code.WORKER_LOST
    assert "exited with code 9 after this stream had begun" in stream.output.error.message
    assert stream.output.text == "a" + _text(deltas)
    assert str(stream.output.text) == ("abc" * 20)[: len(str(stream.output.text))]
    assert all(output.ok for output in outputs)


def test_stream_that_kills_every_worker_before_it_begins_is_convicted() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001) as pool:
        (last,) = pool.stream("killer", SamplingParams(max_tokens=6, extra_args={"fault": "exit", "at": 1}))
        assert last.output is not None
        assert last.output.error is not None
        assert last.output.error.code is Code.WORKER_LOST
        assert pool.generate("and on", FIVE).ok


def test_first_next_raises_when_the_backlog_is_full() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, max_num_seqs=1, max_backlog_items=2) as pool:
        streams = [pool.stream(f"item {index}", ENDLESS) for index in range(20)]
        with pytest.raises(Overloaded):
            next(streams[-1])
        assert next(streams[0]).text == "i"
        for stream in streams:
            stream.close()
        wait_for(lambda: _is_idle(pool), "the aborts")


def test_pool_closed_with_a_stream_unread_lets_it_finish() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.001)
    stream = pool.stream("abc", SamplingParams(max_tokens=30))
    pool.close()
    assert _text(list(stream)) == "abc" * 10
    with pytest.raises(PoolClosed):
        pool.stream("more", FIVE)


def test_pool_closed_without_draining_ends_a_stream_with_the_error() -> None:
    pool = Pool(engine="echo", workers=1, step_s=0.001)
    stream = pool.stream("endless", ENDLESS)
    next(stream)
    closer = threading.Thread(target=pool.close, kwargs={"drain": False})
    closer.start()
    with pytest.raises(PoolClosed):
        list(stream)
    closer.join()


def test_stream_in_a_forked_child_is_refused_and_can_be_dropped(echo_pool: Pool) -> None:
    stream = echo_pool.stream("abc", SamplingParams(max_tokens=100_000))
    next(stream)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of waiting for ever
        try:
            next(stream)
        except ForkedPool:
            stream.close()
            del stream
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(stream).text
    stream.close()

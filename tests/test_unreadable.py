"""A client outlives what it can't read: an item's answer is that item's error, anything else a lost pool that says so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from msgspec import Raw
from odd_dispatcher import OddDispatcher

from enginepool import Code, EnginePoolWarning, Output, Pool, PoolLost, SamplingParams, payload
from enginepool.clock import EngineStamps, encode_stamps
from enginepool.payload import CompletionOutput, GenerateResult, decode_request
from enginepool.protocol import Delta, Result, ResultItem, SubmitItem, encode

GOOD_STAMPS = Raw(encode_stamps(EngineStamps(1.0)))
BAD = {
    "no msgpack": b"\xc1\xc1\xc1",
    "nothing": b"",
    "cut off": payload.encode(GenerateResult([CompletionOutput(0, "text", [1, 2, 3])]))[:-2],
    "another type": payload.encode({"outputs": []}),
    "nested thousands deep": b"\x91" * 5000,
    "bad text": payload.encode(GenerateResult([CompletionOutput(0, "text", [])])).replace(b"text", b"\xff\xfe\xff\xfe"),
}


def _prompt(frame: bytes) -> str:
    return str(getattr(decode_request(frame), "prompt", None))


def _answer(item: SubmitItem, frame: bytes) -> list[bytes]:
    """Prompts say how they are to be answered."""
    prompt = _prompt(frame)
    if prompt in BAD:
        return [encode(Result([ResultItem(item.seq, 0, 1, 0.0, 0.0)])), BAD[prompt]]
    good = payload.encode(GenerateResult([CompletionOutput(0, prompt, [1], "stop")]))
    if prompt == "bad stamps":
        return [encode(Result([ResultItem(item.seq, 0, 1, 0.0, 0.0, None, Raw(b"\x93\xa1x\xa1y\xa1z"))])), good]
    if prompt == "bad delta":
        return [encode(Delta([item.seq])), b"\xc1"]
    if prompt == "no frame":
        return [encode(Result([ResultItem(item.seq, 0, 1, 0.0, 0.0)]))]
    if prompt == "silence":
        return [encode(Delta([])), b""][:1]
    return [encode(Result([ResultItem(item.seq, 0, 1, 0.0, 0.0, None, GOOD_STAMPS)])), good]


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[OddDispatcher]:
    with OddDispatcher(tmp_path, _answer) as dispatcher:
        yield dispatcher


@pytest.fixture
def pool(odd: OddDispatcher) -> Iterator[Pool]:
    with Pool.connect(odd.endpoint) as pool:
        yield pool


def _assert_unreadable(output: Output | None) -> None:
    assert output is not None
    error = output.error
    assert error is not None
    assert (error.code, error.blame) == (Code.UNREADABLE_RESULT, "pool")


@pytest.mark.parametrize("what", [*BAD, "bad stamps"])
def test_result_that_can_not_be_read_is_its_items_error(pool: Pool, what: str) -> None:
    with pytest.warns(EnginePoolWarning, match="1 of 3 items failed"):
        outputs = pool.generate_many(["before", what, "after"])
    assert [output.text for output in outputs] == ["before", None, "after"]
    _assert_unreadable(outputs[1])
    assert (outputs[1].worker, outputs[1].attempts) == (0, 1)
    assert pool.generate("next").text == "next"


def test_delta_that_can_not_be_read_ends_its_stream_and_aborts_it(odd: OddDispatcher, pool: Pool) -> None:
    stream = pool.stream("bad delta")
    list(stream)
    _assert_unreadable(stream.output)
    wait_for(lambda: odd.aborted, "the abort")
    assert pool.generate("next").text == "next"


def test_future_of_a_result_that_can_not_be_read_resolves(pool: Pool) -> None:
    _assert_unreadable(pool.submit("no msgpack").result(timeout=20))


@pytest.mark.parametrize("ask", [lambda pool: pool.status(), lambda pool: pool.generate("no frame")], ids=["no header", "a frame too few"])
def test_message_that_makes_no_sense_is_a_lost_pool_that_says_so(pool: Pool, ask: Any) -> None:
    waiting = pool.submit("silence")
    with pytest.raises(PoolLost, match="does not understand"):
        ask(pool)
    with pytest.raises(PoolLost, match="does not understand"):
        waiting.result(timeout=20)
    assert pool._connection._thread.is_alive()


class Odd(BaseException):
    """Nothing that anybody expects."""


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), Odd(), ValueError("plain")], ids=lambda error: type(error).__name__)
def test_callback_that_raises_anything_leaves_results_coming(
    echo_pool: Pool, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    told: list[str] = []

    def callback(_: object) -> None:
        raise raised

    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        future = echo_pool.submit("first", SamplingParams(max_tokens=50))
        future.add_done_callback(callback)
        future.add_done_callback(lambda done: told.append(str(done.result().text)))
        assert future.result(timeout=20).ok
        assert echo_pool.generate("second", SamplingParams(max_tokens=6)).text == "second"
        wait_for(lambda: told, "the second callback")
    assert type(raised).__name__ in caplog.text


def test_callback_that_exits_in_the_callers_own_thread_does_so(echo_pool: Pool) -> None:
    future = echo_pool.submit("first", SamplingParams(max_tokens=5))
    future.result(timeout=20)
    with pytest.raises(SystemExit):
        future.add_done_callback(lambda _: sys.exit(3))
    bad = echo_pool.submit("half \ud83d", SamplingParams(max_tokens=5))
    with pytest.raises(SystemExit):
        bad.add_done_callback(lambda _: sys.exit(3))

"""After `os.fork()` every verb of the parent's pool raises at once in the child, and goes on in the parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from aio_help import ENDLESS, FIVE, HELLO
from conftest import wait_for

from enginepool import AsyncPool, ForkedPool, Pool
from enginepool.clock import monotonic

CALLS: dict[str, Callable[[Pool], Any]] = {
    "generate": lambda pool: pool.generate("x", FIVE),
    "generate_many": lambda pool: pool.generate_many(["x"], FIVE),
    "chat": lambda pool: pool.chat(HELLO, FIVE),
    "chat_many": lambda pool: pool.chat_many([HELLO], FIVE),
    "iter_many": lambda pool: list(pool.iter_many(["x"], FIVE)),
    "iter_chat_many": lambda pool: list(pool.iter_chat_many([HELLO], FIVE)),
    "stream": lambda pool: list(pool.stream("x", FIVE)),
    "stream_chat": lambda pool: list(pool.stream_chat(HELLO, FIVE)),
    "submit": lambda pool: pool.submit("x", FIVE),
    "submit_chat": lambda pool: pool.submit_chat(HELLO, FIVE),
    "status": lambda pool: pool.status(),
}
ASYNC_CALLS: dict[str, Callable[[AsyncPool], Any]] = {
    "generate": lambda pool: pool.generate("x", FIVE),
    "generate_many": lambda pool: pool.generate_many(["x"], FIVE),
    "chat": lambda pool: pool.chat(HELLO, FIVE),
    "stream": lambda pool: pool.stream("x", FIVE),
    "iter_many": lambda pool: anext(pool.iter_many(["x"], FIVE)),
    "submit": lambda pool: pool.submit("x", FIVE),
    "status": lambda pool: pool.status(),
}


def _in_a_child(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What `work` returns in a forked child; it has five seconds."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        with os.fdopen(writable, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        told = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    result: dict[str, str] = json.loads(told)
    return result


def _outcome(call: Callable[[], Any]) -> str:
    started = monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__ if monotonic() - started < 1.0 else f"{type(error).__name__}, late"
    return "returned"


def test_every_verb_raises_in_a_forked_child_and_the_parents_calls_go_on(echo_pool: Pool) -> None:
    running = echo_pool.submit("running", ENDLESS)
    stream = echo_pool.stream("streaming", ENDLESS)
    next(stream)
    outcomes = _in_a_child(lambda: {name: _outcome(partial(call, echo_pool)) for name, call in CALLS.items()})
    assert outcomes == dict.fromkeys(CALLS, ForkedPool.__name__)
    for call in CALLS.values():
        call(echo_pool)
    assert next(stream).token_ids
    assert not running.done()
    stream.close()
    assert running.cancel()
    wait_for(lambda: echo_pool.status().in_flight == 0, "the end of all")


def test_closing_in_a_forked_child_closes_nothing(echo_pool: Pool) -> None:
    def close() -> None:
        echo_pool.close()
        echo_pool.close(drain=False)

    assert _in_a_child(lambda: {"close": _outcome(close)}) == {"close": "returned"}
    assert echo_pool.generate("still there", FIVE).ok


def test_every_async_verb_raises_in_a_forked_child(echo_pool: Pool) -> None:
    async def main() -> None:
        async with AsyncPool.connect(echo_pool.endpoint) as pool:

            def call_all() -> dict[str, str]:
                return {name: _outcome(partial(_step, call, pool)) for name, call in ASYNC_CALLS.items()}

            assert _in_a_child(call_all) == dict.fromkeys(ASYNC_CALLS, ForkedPool.__name__)
            assert (await pool.generate("still there", FIVE)).ok

    asyncio.run(main())


def _step(call: Callable[[AsyncPool], Any], pool: AsyncPool) -> None:
    """Run a verb as far as it goes without its loop, which is the parent's."""
    thing = call(pool)
    if hasattr(thing, "send"):
        thing.send(None)
    elif hasattr(thing, "__await__"):
        thing.__await__().send(None)

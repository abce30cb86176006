"""A dispatcher that dies, whichever way, ends every call that waits for it, of every kind, within five seconds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from aio_help import ENDLESS, HELLO
from conftest import Serve, Served, wait_for

from enginepool import AsyncPool, NoDispatcher, Pool, PoolLost
from enginepool.clock import monotonic

END_S = 5.0
Way = Callable[[Served, Callable[[], None]], None]
Start = Callable[..., tuple[Served, str]]


def _status_for_ever(pool: Pool) -> None:
    while True:
        pool.status()


CALLS: dict[str, Callable[[Pool], Any]] = {
    "generate": lambda pool: pool.generate("x", ENDLESS),
    "generate with a timeout": lambda pool: pool.generate("x", ENDLESS, timeout_s=600),
    "generate_many": lambda pool: pool.generate_many(["x"] * 5, ENDLESS),
    "chat": lambda pool: pool.chat(HELLO, ENDLESS),
    "chat_many": lambda pool: pool.chat_many([HELLO] * 2, ENDLESS),
    "iter_many": lambda pool: list(pool.iter_many(["x"] * 3, ENDLESS)),
    "iter_chat_many": lambda pool: list(pool.iter_chat_many([HELLO] * 2, ENDLESS)),
    "stream": lambda pool: list(pool.stream("x", ENDLESS)),
    "stream_chat": lambda pool: list(pool.stream_chat(HELLO, ENDLESS)),
    "submit": lambda pool: pool.submit("x", ENDLESS).result(),
    "submit_chat": lambda pool: pool.submit_chat(HELLO, ENDLESS).result(),
    "wait": lambda pool: wait([pool.submit("x", ENDLESS)]).done.pop().result(),
    "status": _status_for_ever,
}


async def _async_status_for_ever(pool: AsyncPool) -> None:
    while True:
        await pool.status()


async def _read(things: Any) -> None:
    async for _ in things:
        pass


ASYNC_CALLS: dict[str, Callable[[AsyncPool], Coroutine[Any, Any, Any]]] = {
    "generate": lambda pool: pool.generate("x", ENDLESS),
    "generate_many": lambda pool: pool.generate_many(["x"] * 5, ENDLESS),
    "chat": lambda pool: pool.chat(HELLO, ENDLESS),
    "chat_many": lambda pool: pool.chat_many([HELLO] * 2, ENDLESS),
    "iter_many": lambda pool: _read(pool.iter_many(["x"] * 3, ENDLESS)),
    "stream": lambda pool: _read(pool.stream("x", ENDLESS)),
    "submit": lambda pool: _wait(pool.submit("x", ENDLESS)),
    "status": _async_status_for_ever,
}


async def _wait(future: asyncio.Future[Any]) -> Any:
    return await future


def _killed(served: Served, begin: Callable[[], None]) -> None:
    """In the middle of everything."""
    begin()
    os.kill(served.pid, signal.SIGKILL)


def _stopped(served: Served, begin: Callable[[], None]) -> None:
    """First it stops, so that some calls are made to one that answers nothing, then it is killed."""
    os.kill(served.pid, signal.SIGSTOP)
    begin()
    os.kill(served.pid, signal.SIGKILL)


def _exited(served: Served, begin: Callable[[], None]) -> None:
    """It leaves of itself and ends its workers, without a word to its clients."""
    begin()

    def has_left() -> bool:
        if served.process.poll() is None:
            os.kill(served.pid, signal.SIGINT)  # the first is a drain, which would wait for all these calls
        return served.process.poll() is not None

    wait_for(has_left, "its exit")


WAYS: dict[str, Way] = {"killed": _killed, "stopped and killed": _stopped, "exited": _exited}


@pytest.fixture
def served(serve: Serve, tmp_path: Path) -> Start:
    """Start a pool with room for all calls at once; gives the process and its endpoint."""
    config = tmp_path / "pool.toml"
    config.write_text("[engine_args]\nstep_s = 0.002\nmax_num_seqs = 64\n")

    def start(*arguments: str) -> tuple[Served, str]:
        one = serve("--engine", "echo", "--workers", "2", "--config", str(config), *arguments)
        return one, str(json.loads(one.ready_line())["endpoint"])

    return start


class Caller:
    """One call on a thread of its own: how it ended, and when."""

    def __init__(self, call: Callable[[Pool], Any], pool: Pool) -> None:
        self.error: BaseException | None = None
        self.ended_at = 0.0
        self._call = call
        self._pool = pool
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._call(self._pool)
        except BaseException as error:
            self.error = error
        self.ended_at = monotonic()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("address", ["ipc", "tcp"])
def test_every_call_ends_as_pool_lost(served: Start, way: str, address: str) -> None:
    dispatcher, endpoint = served(*(("--endpoint", "tcp://127.0.0.1:0") if address == "tcp" else ()))
    pool, closing = Pool.connect(endpoint), Pool.connect(endpoint)
    kept = closing.submit("x", ENDLESS)
    wait_for(lambda: pool.status().in_flight == 1, "the one that is closed")
    callers: dict[str, Caller] = {}

    def begin() -> None:
        callers.update({name: Caller(call, pool) for name, call in CALLS.items()})
        callers["close"] = Caller(lambda _: closing.close(), pool)
        wait_for(lambda: pool._connection.num_pending == 20, "the calls")
        if way == "exited":  # what comes after its first signal would be refused
            wait_for(lambda: pool.status().in_flight == 21, "the items")

    WAYS[way](dispatcher, begin)
    killed_at = monotonic()
    for caller in callers.values():
        caller.thread.join(END_S + 1)
    late = {
        name: caller.ended_at - killed_at for name, caller in callers.items() if not caller.ended_at or caller.ended_at - killed_at >= END_S
    }
    assert not late, {name: repr(callers[name].error) for name in late}
    assert {name: type(caller.error) for name, caller in callers.items()} == dict.fromkeys(CALLS, PoolLost) | {"close": type(None)}
    with pytest.raises(PoolLost):
        kept.result(0)
    started = monotonic()
    for name, call in CALLS.items():
        with pytest.raises(PoolLost):
            pytest.fail(f"{name} returned {call(pool)}")
    pool.close()
    assert monotonic() - started < 1.0


@pytest.mark.parametrize("way", WAYS)
def test_every_async_call_ends_as_pool_lost(served: Start, way: str) -> None:
    dispatcher, endpoint = served()

    async def main() -> None:
        pool = await AsyncPool.connect(endpoint)
        closing = await AsyncPool.connect(endpoint)
        kept = closing.submit("x", ENDLESS)
        assert (await pool.status()).clients == 2
        loop = asyncio.get_running_loop()
        tasks: dict[str, asyncio.Future[Any]] = {}

        def begin() -> None:
            tasks.update({name: asyncio.ensure_future(call(pool)) for name, call in ASYNC_CALLS.items()})
            tasks["close"] = asyncio.ensure_future(closing.close())

        async def all_begun() -> None:
            held = pool._held
            while held is None or held.connection is None or held.connection.num_pending < 14:
                await asyncio.sleep(0.005)

        if way == "stopped and killed":
            os.kill(dispatcher.pid, signal.SIGSTOP)
        begin()
        await asyncio.wait_for(all_begun(), 20)
        while way == "exited" and (await pool.status()).in_flight < 15:
            await asyncio.sleep(0.005)
        WAYS[way](dispatcher, lambda: None)
        killed_at = loop.time()
        ended = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), END_S)
        assert loop.time() - killed_at < END_S
        assert dict(zip(tasks, map(type, ended), strict=True)) == dict.fromkeys(ASYNC_CALLS, PoolLost) | {"close": type(None)}
        with pytest.raises(PoolLost):
            await kept
        await pool.close()

    asyncio.run(main())


def test_connecting_to_a_dispatcher_that_dies_before_its_welcome_ends_soon(served: Start) -> None:
    dispatcher, endpoint = served()
    os.kill(dispatcher.pid, signal.SIGSTOP)
    caller = Caller(lambda _: Pool.connect(endpoint), None)  # type: ignore[arg-type]
    caller.thread.join(0.6)  # so that it has looked once at a dispatcher that is only stopped
    assert caller.thread.is_alive()
    os.kill(dispatcher.pid, signal.SIGKILL)
    killed_at = monotonic()
    caller.thread.join(END_S)
    assert isinstance(caller.error, NoDispatcher)
    assert "gone before it let this client in" in str(caller.error)
    assert caller.ended_at - killed_at < END_S

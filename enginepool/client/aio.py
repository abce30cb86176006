"""AsyncPool: Pool for asyncio programs. Starting, asking and closing only ever wait on the event loop, whichever loop that is."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any, Literal

from enginepool import rundir
from enginepool.client.aio_verbs import AsyncVerbs, LoopPost, until
from enginepool.client.connection import HELLO_TIMEOUT_S, Connection
from enginepool.client.held import Held
from enginepool.client.loading import make_loading_view
from enginepool.client.notebook import remember, replace_old_pools
from enginepool.client.settings import make_settings
from enginepool.client.sidecar import Sidecar
from enginepool.config import PoolSettings
from enginepool.errors import ForkedPool, InvalidRequest, PoolClosed, PoolError
from enginepool.protocol import Stop

KILL_WAIT_S = 5.0
STOP_GRACE_S = 2.0


class AsyncPool(AsyncVerbs):
    """A pool of engines behind one queue, for one event loop.

    `async with AsyncPool(model, workers=2, **engine_args) as pool:` starts one, `async with AsyncPool.connect() as pool:`
    joins a running one; `pool = await AsyncPool(…)` and `await pool.close()` do the same without a block. Takes what `Pool`
    takes and raises what it raises. Should the loop end without a `close`, the pool is killed and nothing is left.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        workers: int | Literal["auto"] = "auto",
        engine: Literal["vllm", "echo"] = "vllm",
        progress: bool | None = None,
        **settings_and_engine_args: Any,
    ) -> None:
        self._settings = make_settings(model, workers=workers, engine=engine, **settings_and_engine_args)
        self._endpoint: str | None = None
        self._progress = progress
        self._prepare()

    @classmethod
    def connect(cls, endpoint: str | None = None) -> AsyncPool:
        """Join a running pool, once this is awaited or entered; `endpoint` as for `Pool.connect`."""
        pool = cls.__new__(cls)
        pool._settings = PoolSettings()
        pool._endpoint = endpoint or rundir.default_endpoint()
        pool._progress = False
        pool._prepare()
        return pool

    def _prepare(self) -> None:
        self._held: Held | None = None
        self._loop_post: LoopPost | None = None
        self._guard: AsyncGenerator[None, None] | None = None
        self._is_started = False
        self._is_closed = False
        self._closing: asyncio.Future[None] | None = None

    async def start(self) -> AsyncPool:
        """Start or join, and wait until it is up. Raises as `Pool(…)` and `Pool.connect` do."""
        if self._is_started:
            raise InvalidRequest("this AsyncPool was started before; make a new one")
        self._is_started = True
        sidecar = None
        try:
            if self._endpoint is None:
                replace_old_pools()
                sidecar = Sidecar.of(self._settings)
                await _bring_up(sidecar, self._progress)
            connection = await _connect(self._endpoint or (sidecar.endpoint if sidecar else ""))
        except BaseException:
            self._is_closed = True
            if sidecar is not None:
                await asyncio.shield(_kill(sidecar))
            raise
        self._loop_post = LoopPost()
        self._held = Held(connection.welcome.endpoint, connection, sidecar)
        self._finalizer = weakref.finalize(self, self._held.release)
        connection.watch_owner(asyncio.get_running_loop().is_closed, self._held.release)
        remember(self, AsyncPool._give_way)
        self._guard = _release_at_loop_end(self._held)
        await anext(self._guard)
        return self

    def __await__(self) -> Generator[Any, None, AsyncPool]:
        return self.start().__await__()

    async def __aenter__(self) -> AsyncPool:
        return self if self._is_started else await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)

    @property
    def endpoint(self) -> str:
        """Where this pool's dispatcher listens; what `connect` takes."""
        return self._usable().welcome.endpoint

    @property
    def model(self) -> str:
        """What the pool runs."""
        return self._usable().welcome.model

    @property
    def pool_id(self) -> str:
        """The pool's own id."""
        return self._usable().welcome.pool_id

    async def close(self, drain: bool = True) -> None:
        """Finish this client's items and calls, then let go; a pool that this one started stops. May be called twice.

        With `drain=False` whatever still waits ends with PoolClosed at once, also while another `close` is draining.
        """
        held, self._is_closed = self._held, True
        if held is None or held.is_foreign:
            return
        if not drain:
            held.connect().abandon()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(held, drain=drain))
        await asyncio.shield(self._closing)  # a cancelled `close` must not leave the pool half way

    async def _close(self, held: Held, *, drain: bool) -> None:
        connection = held.connect()
        if drain:
            await until(connection, lambda: connection.is_idle, self._settings.drain_timeout_s)
        if held.sidecar is not None:
            await _stop(connection, held.sidecar, self._settings.shutdown_timeout_s + STOP_GRACE_S)
        connection.begin_close()
        await until(connection, lambda: connection.is_ended, KILL_WAIT_S)
        connection.close()
        if held.sidecar is not None:
            await _kill(held.sidecar)
        self._finalizer.detach()
        if self._guard is not None:
            await self._guard.aclose()

    def _usable(self) -> Connection:
        held = self._held
        if held is None:
            raise PoolClosed("the pool could not be started") if self._is_closed else InvalidRequest("await this AsyncPool first")
        if held.is_foreign:
            raise ForkedPool("this AsyncPool belongs to the parent process; in a forked child use AsyncPool.connect(endpoint)")
        if self._is_closed:
            raise PoolClosed("the pool is closed; make a new one or connect again")
        return held.connect()

    def _give_way(self) -> bool:
        """Let go at once for a pool that takes this one's place in a notebook; False when there was nothing left to close."""
        if self._held is None or self._is_closed or self._held.is_foreign:
            return False
        self._is_closed = True
        self._held.release()
        return True

    @property
    def _post(self) -> LoopPost:
        assert self._loop_post is not None
        return self._loop_post

    def __repr__(self) -> str:
        connection = self._held.connection if self._held is not None else None
        return f"<AsyncPool {connection.welcome.model if connection else 'not started'}{' (closed)' if self._is_closed else ''}>"


async def _bring_up(sidecar: Sidecar, progress: bool | None) -> None:
    """Start, and watch its descriptors on the loop until it is up."""
    workers = sidecar.settings.workers
    view = make_loading_view(progress, None if workers == "auto" else workers)
    sidecar.on_stage = view.stage
    sidecar.start()
    loop, settled = asyncio.get_running_loop(), asyncio.Event()
    watched = set(sidecar.fds)

    def feed(fd: int) -> None:
        if sidecar.feed(fd):
            settled.set()
        for ended in watched - set(sidecar.fds):
            watched.discard(ended)
            loop.remove_reader(ended)

    try:
        for fd in sidecar.fds:
            loop.add_reader(fd, feed, fd)
        await settled.wait()
        sidecar.outcome()
    finally:
        for fd in watched:
            loop.remove_reader(fd)
        view.close()


async def _connect(endpoint: str) -> Connection:
    connection = Connection(endpoint, waits=False)
    try:
        await until(connection, lambda: connection.is_settled, HELLO_TIMEOUT_S)
        connection.check_in()
    except BaseException:
        connection.begin_close()
        raise
    return connection


async def _stop(connection: Connection, sidecar: Sidecar, timeout_s: float) -> None:
    """Ask it to stop, wait for its exit, and let its last results be read."""
    with suppress(PoolError, PoolClosed):
        connection.post(Stop(), even_if_abandoned=True)
        if await _exited(sidecar, timeout_s):
            await until(connection, lambda: connection.is_lost, 1.0)


async def _kill(sidecar: Sidecar) -> None:
    """Cut its lifeline and wait for its exit; what then still runs is killed."""
    sidecar.begin_kill()
    await _exited(sidecar, KILL_WAIT_S)
    sidecar.kill()


async def _exited(sidecar: Sidecar, timeout_s: float) -> bool:
    """Wait for the process's exit; False at the timeout."""
    if sidecar.exit_code is not None or sidecar.exit_fd < 0:
        return True
    loop, gone, fd = asyncio.get_running_loop(), asyncio.Event(), sidecar.exit_fd
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(timeout_s):
            await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


async def _release_at_loop_end(held: Held) -> AsyncGenerator[None, None]:
    """An async generator that is never finished: a loop that shuts down closes it, and what it holds with it."""
    try:
        yield
    finally:
        held.release()

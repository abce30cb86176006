"""AsyncPool: Pool for asyncio programs. Starting, asking and closing only ever wait on the event loop, whichever loop that is."""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any, Literal

from enginepool import rundir
from enginepool.client.aio_sidecar import AsyncSidecar
from enginepool.client.aio_verbs import AsyncVerbs, LoopPost, until
from enginepool.client.connection import HELLO_TIMEOUT_S, Connection
from enginepool.client.held import Held
from enginepool.client.loading import LoadingView, make_loading_view
from enginepool.client.notebook import keep_awake, remember, replace_old_pools
from enginepool.client.settings import make_settings
from enginepool.config import PoolSettings
from enginepool.errors import EnginePoolError, ForkedPool, InvalidRequest, PoolClosed, PoolError
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
        self._keys: str | os.PathLike[str] | None = self._settings.keys
        self._progress = progress
        self._prepare()

    @classmethod
    def connect(cls, endpoint: str | None = None, *, keys: str | os.PathLike[str] | None = None) -> AsyncPool:
        """Join a running pool, once this is awaited or entered; `endpoint` and `keys` as for `Pool.connect`."""
        pool = cls.__new__(cls)
        pool._settings = PoolSettings()
        pool._endpoint, pool._keys = rundir.choose_target(endpoint, keys)
        pool._progress = False
        pool._prepare()
        return pool

    def _prepare(self) -> None:
        self._held: Held | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_post: LoopPost | None = None
        self._guard: AsyncGenerator[None, None] | None = None
        self._sidecar: AsyncSidecar | None = None
        self._start_over: asyncio.Event | None = None
        self._is_closed = False
        self._closing: asyncio.Future[None] | None = None

    async def start(self) -> AsyncPool:
        """Start or join, and wait until it is up. Raises as `Pool(…)` and `Pool.connect` do."""
        if self._start_over is not None:
            raise InvalidRequest("this AsyncPool was started before; make a new one")
        self._loop, self._start_over = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._hold(await self._bring_up(), self._loop)
        except BaseException as error:
            was_closed, self._is_closed = self._is_closed, True
            if self._sidecar is not None:
                await asyncio.shield(self._sidecar.killed())
            if was_closed and isinstance(error, EnginePoolError):  # what a `close` that ends the start makes of it
                raise PoolClosed("the pool was closed before it had started; make a new one") from None
            raise
        finally:
            self._start_over.set()
        assert self._guard is not None
        await anext(self._guard)
        return self

    async def _bring_up(self) -> Connection:
        self._check_wanted()
        if self._endpoint is None:
            replace_old_pools()
            self._sidecar = AsyncSidecar.of(self._settings)
            await _show_loading(self._sidecar, self._progress)
        connection = await _connect(self._endpoint or (self._sidecar.endpoint if self._sidecar else ""), self._keys)
        try:
            self._check_wanted()
        except PoolClosed:
            connection.begin_close()
            raise
        return connection

    def _check_wanted(self) -> None:
        if self._is_closed:
            raise PoolClosed("the pool was closed before it had started; make a new one")

    def _hold(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._loop_post = LoopPost()
        self._held = held = Held.of(connection, self._sidecar)
        self._finalizer = weakref.finalize(self, held.let_go)
        self._finalizer.atexit = False
        atexit.register(held.release)
        connection.watch_owner(lambda: held.is_let_go or loop.is_closed(), held.release)
        if self._sidecar is not None:
            remember(self, AsyncPool._give_way)
        keep_awake(loop, lambda: not connection.is_ended)
        self._guard = _release_at_loop_end(self._held)

    def __await__(self) -> Generator[Any, None, AsyncPool]:
        return self.start().__await__()

    async def __aenter__(self) -> AsyncPool:
        return self if self._start_over is not None else await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)

    @property
    def endpoint(self) -> str:
        """Where this pool's dispatcher listens; what `connect` takes."""
        return self._started().endpoint

    @property
    def model(self) -> str:
        """What the pool runs."""
        return self._started().connect().welcome.model

    @property
    def pool_id(self) -> str:
        """The pool's own id."""
        return self._started().connect().welcome.pool_id

    async def close(self, drain: bool = True) -> None:
        """Finish this client's items and calls, then let go; a pool that this one started stops. May be called twice.

        With `drain=False` whatever still waits ends with PoolClosed at once, also while another `close` is draining. A start
        that goes on in another task ends with PoolClosed.
        """
        held = self._held
        if held is not None and held.is_foreign:
            return
        if self._loop is not None and self._loop.is_closed():
            self._give_way()
            return
        if self._loop is not None:
            self._check_loop()
        self._is_closed = True
        if held is None:
            await self._end_start()
            return
        if not drain:
            held.connect().abandon()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(held, drain=drain))
        await asyncio.shield(self._closing)  # a cancelled `close` must not leave the pool half way

    async def _end_start(self) -> None:
        if self._start_over is not None:
            if self._sidecar is not None:
                self._sidecar.begin_kill()
            await self._start_over.wait()

    async def _close(self, held: Held, *, drain: bool) -> None:
        connection = held.connect()
        if drain:
            await until(connection, lambda: connection.is_idle, self._settings.drain_timeout_s)
        if self._sidecar is not None:
            await _stop(connection, self._sidecar, self._settings.shutdown_timeout_s + STOP_GRACE_S)
        connection.begin_close()
        await until(connection, lambda: connection.is_ended, KILL_WAIT_S)
        connection.close()
        if self._sidecar is not None:
            await self._sidecar.killed()
        self._finalizer.detach()
        atexit.unregister(held.release)
        if self._guard is not None:
            await self._guard.aclose()

    def _started(self) -> Held:
        if self._held is not None:
            return self._held
        raise PoolClosed("the pool could not be started") if self._is_closed else InvalidRequest("await this AsyncPool first")

    def _usable(self) -> Connection:
        held = self._started()
        if held.is_foreign:
            raise ForkedPool("this AsyncPool belongs to the parent process; in a forked child use AsyncPool.connect(endpoint)")
        if self._is_closed:
            raise PoolClosed("the pool is closed; make a new one or connect again")
        self._check_loop()
        return held.connect()

    def _check_loop(self) -> None:
        """Results are delivered to the loop of the start alone; a task of another one would wait for ever."""
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return
        if self._loop is not None and self._loop.is_closed():
            raise PoolClosed("the event loop of this AsyncPool has ended, and the pool with it; make a new one")
        raise InvalidRequest("this AsyncPool belongs to another event loop; in each loop use one of its own (AsyncPool.connect(endpoint))")

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


async def _show_loading(sidecar: AsyncSidecar, progress: bool | None) -> None:
    """Start it, and show its stages until it is up."""
    workers = sidecar.settings.workers
    view = make_loading_view(progress, None if workers == "auto" else workers)
    sidecar.on_stage = view.stage
    ticker = None if view.tick_s is None else asyncio.ensure_future(_tick(view, view.tick_s))
    try:
        sidecar.start()
        await sidecar.up()
    finally:
        if ticker is not None:
            ticker.cancel()
        view.close()


async def _tick(view: LoadingView, tick_s: float) -> None:
    while True:
        await asyncio.sleep(tick_s)
        view.tick()


async def _connect(endpoint: str, keys: str | os.PathLike[str] | None) -> Connection:
    connection = Connection(endpoint, keys=keys, waits=False)
    try:
        await until(connection, lambda: connection.is_settled, HELLO_TIMEOUT_S)
        if (refusal := connection.refusal()) is not None:
            raise refusal
    except BaseException:
        connection.begin_close()
        raise
    return connection


async def _stop(connection: Connection, sidecar: AsyncSidecar, timeout_s: float) -> None:
    """Ask it to stop, wait for its exit, and let its last results be read."""
    with suppress(PoolError, PoolClosed):
        connection.post(Stop(), even_if_abandoned=True)
        if await sidecar.exited(timeout_s):
            await until(connection, lambda: connection.is_lost, 1.0)


async def _release_at_loop_end(held: Held) -> AsyncGenerator[None, None]:
    """An async generator that is never finished: a loop that shuts down closes it, and what it holds with it."""
    try:
        yield
    finally:
        if not held.is_let_go:
            held.release()

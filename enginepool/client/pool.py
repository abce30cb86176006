"""Pool: the way in for Python programs, embedded (it starts and owns a dispatcher) or connected to a running one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

from enginepool import rundir
from enginepool.client.connection import Connection
from enginepool.client.held import Held
from enginepool.client.notebook import remember, replace_old_pools
from enginepool.client.settings import make_settings
from enginepool.client.sidecar import Sidecar, start_shown
from enginepool.client.verbs import Verbs
from enginepool.config import PoolSettings
from enginepool.errors import ForkedPool, InvalidRequest, PoolClosed, PoolError
from enginepool.protocol import Stop


class Pool(Verbs):
    """A pool of engines behind one queue.

    `Pool(model, workers=2, **engine_args)` starts one; any vLLM engine argument is given by its own name.
    `Pool.connect()` joins a running one. A pickled Pool is a handle: it connects where it is first used, and never owns.
    Thread-safe. Raises SettingsError for a bad setting, StartError when no worker boots (EngineMissing when vLLM is not
    there), EndpointInUse when `endpoint` is taken.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        workers: int | Literal["auto"] = "auto",
        engine: Literal["vllm", "echo"] = "vllm",
        batch_size: int | None = None,
        batch_timeout_s: float | None = None,
        cpu_affinity: str = "auto",
        engine_core: Literal["auto", "inproc", "mp"] = "auto",
        start_timeout_s: float = 600.0,
        drain_timeout_s: float = 300.0,
        shutdown_timeout_s: float = 5.0,
        min_ready: int | None = None,
        progress: bool | None = None,
        **engine_args: Any,
    ) -> None:
        settings = make_settings(
            model,
            workers=workers,
            engine=engine,
            batch_size=batch_size,
            batch_timeout_s=batch_timeout_s,
            cpu_affinity=cpu_affinity,
            engine_core=engine_core,
            start_timeout_s=start_timeout_s,
            drain_timeout_s=drain_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            min_ready=min_ready,
            **engine_args,
        )
        replace_old_pools()
        self._start(settings, progress)
        remember(self, Pool._give_way)

    @classmethod
    def _of(cls, settings: PoolSettings, *, progress: bool | None) -> Pool:
        """Start one from settings that are built already; what a command does with its flags."""
        pool = cls.__new__(cls)
        pool._start(settings, progress)
        return pool

    def _start(self, settings: PoolSettings, progress: bool | None) -> None:
        sidecar = start_shown(settings, progress=progress)
        self._drain_timeout_s = settings.drain_timeout_s
        self._shutdown_timeout_s = settings.shutdown_timeout_s
        try:
            connection = Connection(sidecar.endpoint, keys=settings.keys)
        except BaseException:
            sidecar.kill()
            raise
        self._hold(Held.of(connection, sidecar))

    @classmethod
    def connect(cls, endpoint: str | None = None, *, keys: str | os.PathLike[str] | None = None) -> Pool:
        """Join a running pool: `endpoint`, else ENGINEPOOL_ENDPOINT, else this user's default endpoint.

        `keys` is the path of the keys file for a pool that wants one (default: ENGINEPOOL_KEYS, for tcp). Raises NoDispatcher
        when nothing answers there or it does not let this client in, SettingsError for an endpoint or a keys file that is wrong.
        """
        endpoint, keys = rundir.choose_target(endpoint, keys)
        return cls._joined(Held.of(Connection(endpoint, keys=keys)))

    @classmethod
    def _handle(cls, endpoint: str, keys: str | None = None) -> Pool:
        return cls._joined(Held(endpoint, keys=keys))

    @classmethod
    def _joined(cls, held: Held) -> Pool:
        pool = cls.__new__(cls)
        pool._drain_timeout_s = PoolSettings().drain_timeout_s
        pool._shutdown_timeout_s = PoolSettings().shutdown_timeout_s
        pool._hold(held)
        return pool

    def _hold(self, held: Held) -> None:
        self._held = held
        self._closing = threading.RLock()  # a signal handler may close in the middle of a close
        self._is_closed = False
        self._is_released = False
        self._finalizer = weakref.finalize(self, held.release)

    @property
    def _connection(self) -> Connection:
        return self._held.connect()

    @property
    def endpoint(self) -> str:
        """Where this pool's dispatcher listens; what `Pool.connect` takes."""
        return self._held.endpoint

    @property
    def model(self) -> str:
        """What the pool runs."""
        return self._connection.welcome.model

    @property
    def pool_id(self) -> str:
        """The pool's own id."""
        return self._connection.welcome.pool_id

    def close(self, drain: bool = True) -> None:
        """Finish this client's items and calls, then let go; an embedded pool stops. May be called twice, from any thread.

        With `drain=False` whatever still waits ends with PoolClosed at once, also when another thread's `close` is draining.
        """
        if self._held.is_foreign:
            return
        if not drain:
            self._is_closed = True
            if self._held.connection is not None:
                self._held.connection.abandon()
        with self._closing:
            if self._is_released:
                return
            self._is_closed = True
            try:
                if drain and (connection := self._held.connection) is not None:
                    connection.changes.wait_until(lambda: connection.is_idle, self._drain_timeout_s)
            finally:  # an interrupt of the drain must not leave the pool running
                self._is_released = True
                self._release()

    def _kill(self) -> None:
        """End an embedded pool at once; what a command does that has all its results."""
        self._is_closed = self._is_released = True
        self._finalizer()

    def _give_way(self) -> bool:
        """Close for a pool that takes this one's place in a notebook; False when there was nothing left to close."""
        if self._held.is_foreign:
            return False
        self._is_closed = True
        self._connection.abandon()
        with self._closing:
            if self._is_released:
                return False
            self._is_released = True
            self._finalizer()
        return True

    def _release(self) -> None:
        connection, sidecar = self._held.connection, self._held.sidecar
        if sidecar is not None and connection is not None:
            self._stop(connection, sidecar)
        self._held.close()
        if sidecar is not None:
            sidecar.kill()
        self._finalizer.detach()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def __reduce__(self) -> tuple[Callable[[str, str | None], Pool], tuple[str, str | None]]:
        return type(self)._handle, (self.endpoint, self._held.keys)

    def __repr__(self) -> str:
        connection = self._held.connection
        model = "handle" if connection is None else connection.welcome.model
        return f"<Pool {model} at {self.endpoint}{' (closed)' if self._is_closed else ''}>"

    def _stop(self, connection: Connection, sidecar: Sidecar) -> None:
        try:
            connection.post(Stop(), even_if_abandoned=True)
        except (PoolError, PoolClosed):
            return
        if sidecar.wait(self._shutdown_timeout_s + 2):
            connection.changes.wait_until(lambda: connection.is_lost, 1.0)  # its last results are read before it is let go

    def _usable(self, *, waits: bool = True) -> Connection:
        if self._held.is_foreign:
            raise ForkedPool("this Pool belongs to the parent process; in a forked child use Pool.connect(endpoint)")
        if self._is_closed:
            raise PoolClosed("the pool is closed; make a new one or connect again")
        connection = self._connection
        if connection.is_own_thread and waits:
            raise InvalidRequest("a future's callback must not wait for the pool: it runs on the thread that receives; use submit")
        return connection

"""Pool: the way in for Python programs, embedded (it starts and owns a dispatcher) or connected to a running one."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Literal

from enginepool import rundir
from enginepool.client.connection import Connection
from enginepool.client.loading import shows_loading
from enginepool.client.settings import make_settings
from enginepool.client.sidecar import Sidecar, start_shown
from enginepool.client.verbs import Verbs
from enginepool.config import PoolSettings
from enginepool.errors import ForkedPool, InvalidRequest, PoolClosed, PoolError
from enginepool.protocol import Stop


class _Held:
    """What a pool holds, apart from the pool, so that a finalizer can release it."""

    def __init__(self, connection: Connection | None, sidecar: Sidecar | None) -> None:
        self.connection = connection
        self.sidecar = sidecar
        self.pid = os.getpid()

    def release(self) -> None:
        """Garbage collection and interpreter exit end here: no draining, nothing left behind."""
        if os.getpid() != self.pid:
            return
        if self.connection is not None:
            self.connection.close()
        if self.sidecar is not None:
            self.sidecar.kill()


class Pool(Verbs):
    """A pool of engines behind one queue.

    `Pool(model, workers=2, **engine_args)` starts one; any vLLM engine argument is given by its own name.
    `Pool.connect()` joins a running one. Thread-safe. Raises SettingsError for a bad setting, StartError when no worker
    boots (EngineMissing when vLLM is not there), EndpointInUse when `endpoint` is taken.
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
        sidecar = start_shown(settings, progress=shows_loading(progress))
        self._drain_timeout_s = settings.drain_timeout_s
        self._shutdown_timeout_s = settings.shutdown_timeout_s
        try:
            connection = Connection(sidecar.endpoint)
        except BaseException:
            sidecar.kill()
            raise
        self._hold(connection, sidecar)

    @classmethod
    def connect(cls, endpoint: str | None = None) -> Pool:
        """Join a running pool: `endpoint`, else ENGINEPOOL_ENDPOINT, else this user's default endpoint.

        Raises NoDispatcher when nothing answers there.
        """
        pool = cls.__new__(cls)
        pool._drain_timeout_s = PoolSettings().drain_timeout_s
        pool._shutdown_timeout_s = PoolSettings().shutdown_timeout_s
        pool._hold(Connection(endpoint or rundir.default_endpoint()), None)
        return pool

    def _hold(self, connection: Connection, sidecar: Sidecar | None) -> None:
        self._held = _Held(connection, sidecar)
        self._connection = connection
        self._closing = threading.RLock()  # a signal handler may close in the middle of a close
        self._is_closed = False
        self._is_released = False
        self._finalizer = weakref.finalize(self, self._held.release)

    @property
    def endpoint(self) -> str:
        """Where this pool's dispatcher listens; what `Pool.connect` takes."""
        return self._connection.welcome.endpoint

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
        if os.getpid() != self._held.pid:
            return
        if not drain:
            self._is_closed = True
            self._connection.abandon()
        with self._closing:
            if self._is_released:
                return
            self._is_closed = True
            try:
                if drain:
                    self._connection.wait_idle(self._drain_timeout_s)
            finally:  # an interrupt of the drain must not leave the pool running
                self._is_released = True
                self._release()

    def _release(self) -> None:
        connection, sidecar = self._connection, self._held.sidecar
        if sidecar is not None:
            self._stop(connection, sidecar)
        connection.close()
        if sidecar is not None:
            sidecar.kill()
        self._finalizer.detach()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<Pool {self.model} at {self.endpoint}{' (closed)' if self._is_closed else ''}>"

    def _stop(self, connection: Connection, sidecar: Sidecar) -> None:
        try:
            connection.post(Stop(), even_if_abandoned=True)
        except (PoolError, PoolClosed):
            return
        if sidecar.wait(self._shutdown_timeout_s + 2):
            connection.wait_lost(1.0)  # its last results are read before it is let go

    def _usable(self, *, waits: bool = True) -> Connection:
        if os.getpid() != self._held.pid:
            raise ForkedPool("this Pool belongs to the parent process; in a forked child use Pool.connect(endpoint)")
        if self._is_closed:
            raise PoolClosed("the pool is closed; make a new one or connect again")
        if self._connection.is_own_thread and waits:
            raise InvalidRequest("a future's callback must not wait for the pool: it runs on the thread that receives; use submit")
        return self._connection

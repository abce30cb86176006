"""What a pool holds, apart from the pool, so that a finalizer can release it: a connection and, if it owns one, a sidecar."""

from __future__ import annotations

import atexit
import os
import threading

from enginepool.client.connection import Connection
from enginepool.client.sidecar import Sidecar
from enginepool.errors import ForkedPool, PoolClosed


class Held:
    """A handle holds nothing until `connect` is first called; it belongs to the process that did."""

    def __init__(
        self, endpoint: str, connection: Connection | None = None, sidecar: Sidecar | None = None, keys: str | None = None
    ) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self.connection = connection
        self.sidecar = sidecar
        self._pid = None if connection is None else os.getpid()
        self._lock = threading.RLock()  # a signal handler may close in the middle of a connect
        self._is_closed = False
        self.is_let_go = False

    @classmethod
    def of(cls, connection: Connection, sidecar: Sidecar | None = None) -> Held:
        """Hold what is connected already."""
        return cls(connection.address, connection, sidecar, connection.way.keys_path)

    @property
    def is_foreign(self) -> bool:
        """Whether a parent of this process has used it: its connection does not work here."""
        return self._pid not in (None, os.getpid())

    def connect(self) -> Connection:
        """The connection, made now if it is a handle's first use. Raises NoDispatcher when nothing answers."""
        if self.connection is not None:
            return self.connection
        if self.is_foreign:
            raise ForkedPool("this Pool was being connected by the parent process; in a forked child use Pool.connect(endpoint)")
        self._pid = os.getpid()  # before the lock: a child that is forked now is refused, it does not wait for ever
        with self._lock:
            if self.connection is None:
                self._check()
                try:
                    self.connection = Connection(self.endpoint, keys=self.keys)
                except BaseException:
                    self._pid = None
                    raise
                self._pid = os.getpid()
                self._check()
            return self.connection

    def close(self) -> None:
        """Let the connection go, and connect no more."""
        with self._lock:
            self._is_closed = True
            if self.connection is not None:
                self.connection.close()

    def let_go(self) -> None:
        """Garbage collection on an event loop ends here: it must not wait, so the receiving thread does the rest."""
        self.is_let_go = True

    def release(self) -> None:
        """Garbage collection and interpreter exit end here: no draining, nothing left behind."""
        atexit.unregister(self.release)
        if self._pid != os.getpid():
            return
        if self.connection is not None:
            self.connection.close()
        if self.sidecar is not None:
            self.sidecar.kill()

    def _check(self) -> None:
        if self._is_closed:
            if self.connection is not None:
                self.connection.close()
            raise PoolClosed("the pool is closed; make a new one or connect again")

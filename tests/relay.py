"""A wire tap for tests: a TCP port that passes everything on to another one and keeps what went through."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType


class Relay:
    """Listens on loopback while the block lasts; `sent` and `answered` hold the bytes of all connections.

    With `tamper` it changes a bit of all that it passes on.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.sent = bytearray()
        self.answered = bytearray()
        self.tamper = False
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """Where to connect."""
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Break all connections that there are, and take no more."""
        for one in [self._listener, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for one in [self._listener, *self._sockets]:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                self._start(self._pass_on, near, far, self.sent)
                self._start(self._pass_on, far, near, self.answered)

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                kept += data
                target.sendall(data if not self.tamper else data[:-1] + bytes([data[-1] ^ 1]))
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, act: object, *arguments: object) -> None:
        assert callable(act)
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

"""The watches: which socket or descriptor wakes the loop, and who handles it."""

from __future__ import annotations

from collections.abc import Callable

from enginepool.transport import POLLIN, Poller

Handler = Callable[[], None]


class Watches:
    """What one poll waits for. A handler may add and remove others, its own included."""

    def __init__(self) -> None:
        self._poller = Poller()
        self._handlers: dict[object, Handler] = {}

    def add_socket(self, socket: object, handler: Handler) -> None:
        """Call `handler` while the ZeroMQ socket has messages."""
        self._handlers[socket] = handler
        self._poller.register(socket, POLLIN)

    def add(self, fd: int, handler: Handler) -> None:
        """Call `handler` while the descriptor is readable."""
        self._handlers[fd] = handler
        self._poller.register(fd, POLLIN)

    def remove(self, fd: int) -> None:
        """Watch the descriptor no more, if it is watched."""
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def handle(self, timeout_ms: int) -> None:
        """Wait for so long at most, and call whoever has something to do."""
        for key, _ in self._poller.poll(timeout_ms):
            handler = self._handlers.get(key)
            if handler is not None:
                handler()

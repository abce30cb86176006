"""The only maker of ZeroMQ sockets: framing, limits, and a bounded queue for each peer.

A ROUTER drops silently toward an unknown or slow peer unless it is told otherwise, so sends here are mandatory and
never block: what a slow peer does not take waits in that peer's own queue, and a full queue says so to the caller.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import zmq

from enginepool.errors import EndpointInUse, SettingsError

Poller = zmq.Poller
POLLIN = zmq.POLLIN
POLLOUT = zmq.POLLOUT

Frames = Sequence[bytes]


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context(io_threads=1)


class Router:
    """The dispatcher's side: many peers, each with its own queue of what it has not taken yet."""

    def __init__(self, max_frame_bytes: int, max_queued_messages: int = 100_000) -> None:
        self._context = _context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._queues: dict[bytes, deque[Frames]] = {}
        self._max_queued_messages = max_queued_messages

    def bind(self, endpoint: str) -> str:
        """Bind and return the real address. ipc sockets are made in a private folder's umask, so no other user connects."""
        umask = os.umask(0o177)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise EndpointInUse(f"{endpoint} is in use by another program; choose another --endpoint") from None
            raise SettingsError(f"endpoint {endpoint}: {os.strerror(error.errno or 0)}") from None
        finally:
            os.umask(umask)
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message as (peer, frames), or None when there is none now."""
        try:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer, frames

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Send or queue; False when the peer is gone or its queue is full."""
        queue = self._queues.get(peer)
        if queue:
            if len(queue) >= self._max_queued_messages:
                return False
            queue.append(frames)
            return True
        return self._try_send(peer, frames)

    def flush(self) -> bool:
        """Try the queued messages again; True while some are left."""
        for peer, queue in list(self._queues.items()):
            while queue and self._send_now(peer, queue[0]) is not False:
                queue.popleft()
            if not queue:
                del self._queues[peer]
        return bool(self._queues)

    @property
    def has_queued(self) -> bool:
        """Whether some peer is behind."""
        return bool(self._queues)

    def forget(self, peer: bytes) -> None:
        """Drop what is queued for a peer that is gone."""
        self._queues.pop(peer, None)

    def close(self, linger_ms: int = 200) -> None:
        """Give what was sent a moment to leave, then close."""
        self.socket.close(linger_ms)
        self._context.term()

    def _try_send(self, peer: bytes, frames: Frames) -> bool:
        sent = self._send_now(peer, frames)
        if sent is False:
            self._queues.setdefault(peer, deque()).append(frames)
        return sent is not None

    def _send_now(self, peer: bytes, frames: Frames) -> bool | None:
        """True when sent, False when the peer is slow, None when there is no such peer."""
        try:
            self.socket.send_multipart([peer, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise
        return True


class Dealer:
    """A client's or a worker's side: one connection, used by one thread."""

    def __init__(self, endpoint: str, max_frame_bytes: int = -1) -> None:
        self._context = _context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise SettingsError(f"endpoint {endpoint}: {error.strerror}") from None

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None when there is none now."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frames: Frames) -> None:
        """Hand over to ZeroMQ; a DEALER without limits never blocks."""
        self.socket.send_multipart(frames)

    def close(self, linger_ms: int = 1000) -> None:
        """Give what was sent a moment to leave, then close."""
        self.socket.close(linger_ms)
        self._context.term()

"""The only maker of ZeroMQ sockets: framing, limits, and a queue for each peer.

A ROUTER drops silently toward an unknown or slow peer unless it is told otherwise, so sends here are mandatory and
never block: what a slow peer does not take waits in that peer's own queue, and who sends can ask how large that is.
"""

from __future__ import annotations

import math
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import zmq

from enginepool.curve import Door, LinkEvent, LinkMonitor, check_pairs, encrypt_client
from enginepool.errors import EndpointInUse, SettingsError
from enginepool.keys import ClientKeys, PoolKeys

Poller = zmq.Poller
POLLIN = zmq.POLLIN
POLLOUT = zmq.POLLOUT

Frames = Sequence[bytes]

CUT = b"\xc1enginepool cut\xc1"
"""The last frame of a message whose sender was interrupted between two frames; msgpack never uses 0xC1. Receivers drop it whole."""
MAX_CUTS_AT_ONCE = 16
FRAME_OVERHEAD = 64
HANDSHAKE_MS = 10_000
FIRST_RETRY_S = 0.002
LAST_RETRY_S = 0.032

# pyzmq's flags are enums whose `|` costs more than the send itself, so they are taken as integers once
_NOBLOCK, _SNDMORE, _RCVMORE, _EVENTS, _POLLIN = (int(flag) for flag in (zmq.NOBLOCK, zmq.SNDMORE, zmq.RCVMORE, zmq.EVENTS, zmq.POLLIN))


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context(io_threads=1)


class _Queue:
    """What one peer has not taken yet. `num_bytes` counts a little for each frame, so that many empty ones weigh too."""

    __slots__ = ("messages", "num_bytes", "retry_at", "retry_s")

    def __init__(self) -> None:
        self.messages: deque[Frames] = deque()
        self.num_bytes = 0
        self.retry_s = FIRST_RETRY_S
        self.retry_at = 0.0

    def append(self, frames: Frames) -> None:
        self.messages.append(frames)
        self.num_bytes += _weight(frames)

    def drop_first(self) -> None:
        self.num_bytes -= _weight(self.messages.popleft())


class Router:
    """The dispatcher's side: many peers, each with its own queue of what it has not taken yet.

    With keys it talks to their clients only; its `door` has to be polled then, and answered.
    """

    def __init__(
        self, max_frame_bytes: int, beside: Router | None = None, max_unsent_messages: int = 1000, keys: PoolKeys | None = None
    ) -> None:
        """`beside` another router: both share one ZeroMQ I/O thread, and `beside` has to be closed last.

        Of a slow peer's messages ZeroMQ itself holds `max_unsent_messages`, whatever their size; all others wait here.
        """
        if keys is not None:
            check_pairs(keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = beside._context if beside else _context()
        self._owns_context = beside is None
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.SNDHWM, max_unsent_messages)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._queues: dict[bytes, _Queue] = {}
        self.door = None if keys is None else Door(self._context, self.socket, keys)

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
        """The next message as (peer, frames), or None when there is none now. After too many cut ones it comes without frames."""
        num_cut = 0
        while (frames := _receive(self.socket)) is not None and frames[-1] == CUT and num_cut < MAX_CUTS_AT_ONCE:
            num_cut += 1
        if frames is None:
            return None
        return frames[0], [] if frames[-1] == CUT else frames[1:]

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Send or queue; False when there is no such peer (any more)."""
        queue = self._queues.get(peer)
        sent = False if queue else self._send_now(peer, frames)
        if sent is False:
            if queue is None:
                queue = self._queues[peer] = _Queue()
            queue.append(frames)
        return sent is not None

    def send_or_drop(self, peer: bytes, frames: Frames) -> None:
        """Send to a peer for whom nothing is ever kept; what it does not take now is dropped."""
        if peer not in self._queues:
            self._send_now(peer, frames)

    def queued_bytes(self, peer: bytes) -> int:
        """How much waits here for a peer."""
        queue = self._queues.get(peer)
        return queue.num_bytes if queue else 0

    def flush(self, now: float) -> list[bytes]:
        """Try the queued messages again, less and less often for a peer that takes none; returns the peers that have gone meanwhile."""
        due = [(peer, queue) for peer, queue in self._queues.items() if now >= queue.retry_at]
        return [peer for peer, queue in due if not self._flush_queue(peer, queue, now)]

    @property
    def retry_at(self) -> float:
        """When `flush` is worth calling again, or infinity: all peers have taken everything."""
        return min((queue.retry_at for queue in self._queues.values()), default=math.inf)

    def forget(self, peer: bytes) -> None:
        """Drop what is queued for a peer that is gone."""
        self._queues.pop(peer, None)

    def close(self, linger_ms: int = 200) -> None:
        """Give what was sent a moment to leave, then close."""
        self.socket.close(linger_ms)
        if self.door is not None:
            self.door.close()
        if self._owns_context:
            self._context.term()

    def _flush_queue(self, peer: bytes, queue: _Queue, now: float) -> bool:
        """False when there is no such peer any more."""
        num_left = len(queue.messages)
        sent: bool | None = True
        while queue.messages and (sent := self._send_now(peer, queue.messages[0])):
            queue.drop_first()
        if not queue.messages or sent is None:
            del self._queues[peer]
        has_moved = len(queue.messages) < num_left
        queue.retry_s = FIRST_RETRY_S if has_moved else min(LAST_RETRY_S, 2 * queue.retry_s)
        queue.retry_at = now + queue.retry_s
        return sent is not None

    def _send_now(self, peer: bytes, frames: Frames) -> bool | None:
        """True when sent, False when the peer is slow, None when there is no such peer."""
        try:
            _send(self.socket, [peer, *frames], _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise
        return True


def _weight(frames: Frames) -> int:
    return sum(map(len, frames)) + FRAME_OVERHEAD * len(frames)


class Dealer:
    """A client's or a worker's side: one connection that several threads may use.

    Each operation holds a lock, which is the full fence that ZeroMQ asks for when a socket changes threads. Waiting is
    done outside it, on the socket's descriptor; that descriptor only tells edges, and any operation may consume one, so
    whoever has sent looks whether messages wait and, if so, wakes the thread that receives.
    """

    def __init__(self, endpoint: str, max_frame_bytes: int = -1, keys: ClientKeys | None = None) -> None:
        if keys is not None:
            check_pairs(keys)
        self._context = _context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._lock = threading.Lock()
        self._later: deque[Frames] = deque()
        self._may_be_cut = False
        self._senders: set[int] = set()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._let_go = weakref.finalize(self, os.close, self._wake_fd)  # not in `close`: `wake` may come in the middle of it
        self._is_closed = False
        self._poll = select.poll()
        if keys is not None:
            encrypt_client(self._socket, keys)
        self._monitor = LinkMonitor(self._socket) if endpoint.startswith("tcp://") else None
        if self._monitor is not None:
            self._poll.register(self._monitor.fd, select.POLLIN)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise SettingsError(f"endpoint {endpoint}: {error.strerror}") from None
        self._poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def watch(self, fd: int) -> None:
        """Let `wait` end when this descriptor is readable too."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching."""
        self._poll.unregister(fd)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for a message, a `wake` or a watched descriptor; returns the watched ones that are readable (receiving thread)."""
        events = self._poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        fds = [fd for fd, _ in events]
        if self._wake_fd in fds:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        return fds

    def wake(self) -> None:
        """End the receiving thread's `wait`. Takes no lock, for a signal handler may call it in the middle of a `send`."""
        if self._let_go.alive:
            os.eventfd_write(self._wake_fd, 1)

    def release(self) -> None:
        """Let go of what `wake` uses, once nobody can call it any more."""
        self._let_go()

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None when there is none now (receiving thread)."""
        with self._lock:
            frames = _receive(self._socket)
        if self._later:
            self._send_later()
        return frames

    def link_events(self) -> list[LinkEvent]:
        """What has happened to a tcp connection since the last call (receiving thread)."""
        return [] if self._monitor is None else self._monitor.events()

    def send(self, frames: Frames) -> None:
        """Hand over to ZeroMQ (any thread); a DEALER without limits never blocks. After `close` or a broken protocol nothing is sent."""
        me = threading.get_ident()
        self._senders.add(me)
        try:
            with self._lock:
                if self._is_closed:
                    return
                self._send_locked(frames)
        finally:
            self._senders.discard(me)
        if self._later:
            self._send_later()

    def send_soon(self, frames: Frames) -> None:
        """Like `send`, but never waits: safe in a finalizer, which may run in a thread that holds the lock already."""
        self._later.append(frames)
        self._send_later()

    def _send_later(self) -> None:
        """Whoever holds the lock comes here after letting go of it, so nothing stays."""
        while self._later and self._lock.acquire(blocking=False):
            me = threading.get_ident()
            self._senders.add(me)
            try:
                while self._later and not self._is_closed:
                    self._send_locked(self._later.popleft())
                if self._is_closed:
                    self._later.clear()
            finally:
                self._lock.release()
                self._senders.discard(me)

    def _send_locked(self, frames: Frames) -> None:
        """A signal handler that raises (Ctrl-C) may cut a message between two frames; the next send ends it for good."""
        try:
            if self._may_be_cut:
                self._socket.send(CUT, 0)
            self._may_be_cut = True
            _send(self._socket, frames, 0)
        except zmq.Again:  # libzmq has given the connection up, for its peer does not keep to the protocol: there is nobody to send to
            pass
        self._may_be_cut = False
        if int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            os.eventfd_write(self._wake_fd, 1)

    @property
    def is_interrupted_here(self) -> bool:
        """Whether this thread's own send was interrupted by what runs now, a signal handler; nobody else can send or receive then."""
        return threading.get_ident() in self._senders

    def close(self, linger_ms: int = 1000) -> None:
        """Give what was sent a moment to leave, then close."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._monitor is not None:
                self._monitor.close()
            self._socket.close(linger_ms)
        self._context.term()


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Looking first is cheaper than the exception that an empty socket raises."""
    if not int(socket.getsockopt(_EVENTS)) & _POLLIN:
        return None
    frames = [socket.recv(_NOBLOCK)]
    while socket.getsockopt(_RCVMORE):
        frames.append(socket.recv(_NOBLOCK))
    return frames


def _send(socket: zmq.Socket[bytes], frames: Frames, flags: int) -> None:
    for frame in frames[:-1]:
        socket.send(frame, flags | _SNDMORE)
    socket.send(frames[-1], flags)

"""The link: the worker's I/O thread. It alone owns the socket; the engine's thread talks to it through two queues."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from enginepool.clock import monotonic
from enginepool.handover import WorkerSpec
from enginepool.payload import GenerateRequest, decode_request
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Drain,
    Enroll,
    Goodbye,
    Heartbeat,
    Lease,
    Message,
    Rejected,
    Stop,
    decode_to_worker,
    encode,
)
from enginepool.status import Load
from enginepool.transport import POLLIN, Dealer, Frames, Poller


class Batch(msgspec.Struct):
    """Leased items, decoded; a request that can't be decoded is the error that says so."""

    leases: list[int]
    requests: list[GenerateRequest | msgspec.DecodeError]
    arrived: float


Command = Batch | Abort | Drain | Stop


class Link(threading.Thread):
    """Connects, enrols, beats, receives commands into `inbox` and sends what `send` is given."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(name="enginepool-link", daemon=True)
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.load: Callable[[], Load] = Load
        self.is_ready = False
        self._spec = spec
        self._outbox: deque[Frames] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False

    def send(self, message: Message, payloads: Sequence[bytes] = ()) -> None:
        """Queue a message (any thread)."""
        self._outbox.append([encode(message), *payloads])
        os.eventfd_write(self._wake_fd, 1)

    def close(self, error: str | None = None) -> None:
        """Say goodbye, let everything leave, stop the thread."""
        self.send(Goodbye(error))
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self.join(5)

    def run(self) -> None:
        """The thread: one poll loop."""
        dealer = Dealer(self._spec.endpoint)
        poller = Poller()
        poller.register(dealer.socket, POLLIN)
        poller.register(self._wake_fd, POLLIN)
        spec = self._spec
        dealer.send([encode(Enroll(PROTOCOL_VERSION, spec.pool_id, spec.secret, spec.index, os.getpid()))])
        beat_at = 0.0
        while True:
            now = monotonic()
            if now >= beat_at:
                beat_at = now + spec.heartbeat_s
                dealer.send([encode(Heartbeat(self.load()))])
            for key, _ in poller.poll(int(max(0.0, beat_at - now) * 1000) + 1):
                if key == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
            self._receive(dealer)
            is_last = self._is_closing
            while self._outbox:
                dealer.send(self._outbox.popleft())
            if is_last:
                dealer.close()
                return

    def _receive(self, dealer: Dealer) -> None:
        while (frames := dealer.receive()) is not None:
            match decode_to_worker(frames[0]):
                case Lease(leases):
                    self.inbox.put(Batch(leases, [_decode(frame) for frame in frames[1:]], monotonic()))
                case Rejected():
                    os._exit(1)
                case Stop() if not self.is_ready:
                    os._exit(0)
                case command:
                    self.inbox.put(command)


def _decode(frame: bytes) -> GenerateRequest | msgspec.DecodeError:
    try:
        return decode_request(frame)
    except msgspec.DecodeError as error:
        return error

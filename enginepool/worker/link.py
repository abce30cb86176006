"""The link: a worker's line to the dispatcher. The engine's thread sends and receives; a beat thread proves that the process lives.

While the engine is being built, its thread is busy for long, so another one listens: a stop in that time ends the
process at once, there is nothing to shut down yet.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from enginepool.clock import monotonic
from enginepool.errors import sayable
from enginepool.handover import WorkerSpec
from enginepool.payload import Request, decode_request
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
from enginepool.transport import Dealer


class Batch(msgspec.Struct):
    """Leased items, decoded; a request that can't be decoded is the error that says so."""

    leases: list[int]
    requests: list[Request | Exception]
    arrived: float


Command = Batch | Abort | Drain | Stop


class Link:
    """Connects, enrols and beats; `take` gives the engine's thread its commands, `send` takes its answers."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.load: Callable[[], Load] = Load
        self.is_leaving = False
        self._heartbeat_s = spec.heartbeat_s
        self._is_loading = True
        self._is_closing = threading.Event()
        self._dealer = Dealer(spec.endpoint)
        self.send(Enroll(PROTOCOL_VERSION, spec.pool_id, spec.secret, spec.index, os.getpid()))
        self._beater = threading.Thread(target=self._beat, name="enginepool-beat", daemon=True)
        self._listener = threading.Thread(target=self._listen_while_loading, name="enginepool-loading", daemon=True)
        self._beater.start()
        self._listener.start()

    def become_ready(self) -> None:
        """The engine is up: from now on its own thread listens, and only that one may."""
        self._is_loading = False
        self._dealer.wake()
        self._listener.join()

    def send(self, message: Message, payloads: Sequence[bytes] = ()) -> None:
        """Send a message (any thread)."""
        self._dealer.send([encode(message), *payloads])

    def take(self, *, wait: bool) -> Command | None:
        """The next command; None when there is none now (with `wait`, only after something woke the wait)."""
        frames = self._dealer.receive()
        if frames is None and wait:
            self._dealer.wait(None)
            frames = self._dealer.receive()
        return None if frames is None else _command(frames)

    def close(self, error: str | None = None) -> None:
        """Say goodbye, let everything leave, stop beating."""
        self.send(Goodbye(None if error is None else sayable(error)))
        self._is_closing.set()
        if self._is_loading:
            self.become_ready()
        self._beater.join(5)
        self._dealer.close()

    def _beat(self) -> None:
        while not self._is_closing.is_set():
            self.send(Heartbeat(self.load()))
            self._is_closing.wait(self._heartbeat_s)

    def _listen_while_loading(self) -> None:
        while self._is_loading:
            frames = self._dealer.receive()
            if frames is None:
                self._dealer.wait(None)
            elif isinstance(_command(frames), Stop | Drain):
                os._exit(0)


def _command(frames: list[bytes]) -> Command:
    match decode_to_worker(frames[0]):
        case Lease(leases):
            return Batch(leases, [_decode(frame) for frame in frames[1:]], monotonic())
        case Rejected():
            with suppress(OSError):
                os.write(2, b"the dispatcher does not know this worker; exiting\n")
            os._exit(1)
        case command:
            return command


def _decode(frame: bytes) -> Request | Exception:
    try:
        return decode_request(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        return error

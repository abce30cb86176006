"""The back: workers enrol here, get leases, and send results and heartbeats."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from enginepool.dispatcher.assign import WorkerLoad
from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.roster import Roster, Slot
from enginepool.protocol import (
    PROTOCOL_VERSION,
    UNREADABLE,
    Abort,
    Delta,
    Done,
    Enroll,
    Goodbye,
    Heartbeat,
    Lease,
    Message,
    Ready,
    Rejected,
    Stage,
    StartFailed,
    Stop,
    Window,
    WorkerMessage,
    decode_enroll,
    decode_from_worker,
    encode,
)
from enginepool.status import WorkerState
from enginepool.transport import Router

MAX_MESSAGES_A_TURN = 256
MAX_ENROLL_BYTES = 4096
MAX_REASON = 300


class Back:
    """Serves the workers' socket."""

    def __init__(
        self,
        router: Router,
        roster: Roster,
        pool_id: str,
        secret: bytes,
        start_timeout_s: float,
        on_ready: Callable[[Slot, Ready], None],
        log: Callable[[Slot, str], None],
    ) -> None:
        self.router = router
        self.desk: Desk | None = None
        self.on_leased: Callable[[int, list[Item], float], None] | None = None
        self._roster = roster
        self._pool_id = pool_id
        self._secret = secret
        self._start_timeout_s = start_timeout_s
        self._on_ready = on_ready
        self._log = log
        self._slots: dict[bytes, Slot] = {}

    def receive(self, now: float) -> bool:
        """Handle what has arrived, a bounded number of messages at a time; True when the socket was emptied."""
        for _ in range(MAX_MESSAGES_A_TURN):
            received = self.router.receive()
            if received is None:
                return True
            peer, frames = received
            if frames:
                self._read(peer, frames, now)
        return False

    def loads(self) -> list[WorkerLoad]:
        """The workers that take work now, with what they hold."""
        assert self.desk is not None
        leases = self.desk.leases
        return [
            WorkerLoad(slot.index, slot.capacity, slot.prefetch, leases.sequences(slot.index), leases.is_isolating(slot.index))
            for slot in self._roster.slots
            if slot.state is WorkerState.READY and slot.capacity > 0 and slot.peer is not None and not slot.is_held
        ]

    def assign(self, now: float) -> None:
        """Hand out what the workers want."""
        assert self.desk is not None
        if self.desk.backlog:
            for worker, numbers, payloads in self.desk.grant(self.loads(), now, self._roster.usable):
                if self.on_leased is not None:
                    self.on_leased(worker, self.desk.leases.items_of(worker, numbers), now)
                self._to_worker(worker, Lease(numbers), payloads)

    def abort(self, worker: int, numbers: list[int]) -> None:
        """Tell a worker to stop running these leases."""
        self._to_worker(worker, Abort(numbers))

    def stop(self, worker: int) -> None:
        """Ask a worker to shut its engine down and exit."""
        self._to_worker(worker, Stop())

    def forget(self, slot: Slot) -> None:
        """The worker's process is gone; whatever still comes from it is not listened to."""
        if slot.peer is not None:
            self._slots.pop(slot.peer, None)
            self.router.forget(slot.peer)

    def _read(self, peer: bytes, frames: list[bytes], now: float) -> None:
        """Of a stranger nothing but an Enroll is decoded, and nothing is ever kept for it."""
        slot, header = self._slots.get(peer), frames[0]
        try:
            message = decode_from_worker(header) if slot else decode_enroll(header[:MAX_ENROLL_BYTES])
        except UNREADABLE as error:
            self._reject(peer, f"a message could not be read: {error}")
            return
        if slot is not None:
            self._handle(slot, message, frames[1:], now)
        elif not isinstance(message, Enroll) or not self._enroll(peer, message):
            self._reject(peer, "this dispatcher did not start you")

    def _handle(self, slot: Slot, message: WorkerMessage, payloads: list[bytes], now: float) -> None:
        match message:
            case Done(items):
                assert self.desk is not None
                for item, payload in zip(items, payloads, strict=False):
                    self.desk.done(slot.index, item.lease, payload, item.error, item.stamps)
            case Delta(numbers):
                assert self.desk is not None
                for number, payload in zip(numbers, payloads, strict=False):
                    self.desk.delta(slot.index, number, payload)
            case Heartbeat(load):
                slot.beat(load, now)
            case Window(capacity, prefetch):
                slot.capacity, slot.prefetch = capacity, prefetch
            case Stage(text):
                slot.progressed(now, self._start_timeout_s, text)
                self._log(slot, text)
            case Ready():
                if slot.state is WorkerState.STARTING:  # one that was asked to stop meanwhile goes on stopping
                    self._on_ready(slot, message)
                    slot.became_ready()
            case StartFailed(kind, text):
                slot.failure, slot.failure_kind = text, kind
            case Goodbye(error):
                slot.farewell = error

    def _enroll(self, peer: bytes, enroll: Enroll) -> bool:
        """Let one process in for each worker that was started, and only once."""
        is_ours = hmac.compare_digest(enroll.secret, self._secret) and enroll.pool_id == self._pool_id
        slot = next((slot for slot in self._roster.slots if (slot.pid, slot.index) == (enroll.pid, enroll.index)), None)
        if slot is None or slot.peer is not None or not is_ours or enroll.version != PROTOCOL_VERSION:
            return False
        slot.peer = peer
        self._slots[peer] = slot
        return True

    def _reject(self, peer: bytes, reason: str) -> None:
        self.router.send_or_drop(peer, [encode(Rejected(reason[:MAX_REASON]))])

    def _to_worker(self, worker: int, message: Message, payloads: list[bytes] | None = None) -> None:
        peer = self._roster.slots[worker].peer
        if peer is not None:
            self._send(peer, message, payloads)

    def _send(self, peer: bytes, message: Message, payloads: list[bytes] | None = None) -> None:
        """A send to a worker that has just died is not an error: its exit puts the items back."""
        self.router.send(peer, [encode(message), *(payloads or ())])

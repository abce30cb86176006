"""The back: workers enrol here, get leases, and send results and heartbeats."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec

from enginepool.dispatcher.assign import WorkerLoad
from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.roster import Roster, Slot
from enginepool.protocol import (
    PROTOCOL_VERSION,
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
    decode_from_worker,
    encode,
)
from enginepool.status import WorkerState
from enginepool.transport import Router

MAX_MESSAGES_A_TURN = 256


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
            try:
                message = decode_from_worker(frames[0]) if frames else None
            except msgspec.DecodeError as error:
                self._send(peer, Rejected(f"a message could not be read: {error}"))
                continue
            if message is not None:
                self._handle(peer, message, frames[1:], now)
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
            for worker, numbers, payloads in self.desk.grant(self.loads(), now, is_complete=self._roster.is_complete):
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

    def _handle(self, peer: bytes, message: WorkerMessage, payloads: list[bytes], now: float) -> None:
        if isinstance(message, Enroll):
            self._enroll(peer, message)
            return
        slot = self._slots.get(peer)
        if slot is None:
            self._send(peer, Rejected("this dispatcher did not start you"))
            return
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
                slot.became_ready()
                self._on_ready(slot, message)
            case StartFailed(kind, text):
                slot.failure, slot.failure_kind = text, kind
            case Goodbye(error):
                slot.farewell = error

    def _enroll(self, peer: bytes, enroll: Enroll) -> None:
        slot = next((slot for slot in self._roster.slots if slot.pid == enroll.pid and slot.index == enroll.index), None)
        is_ours = (
            hmac.compare_digest(enroll.secret, self._secret) and enroll.pool_id == self._pool_id and enroll.version == PROTOCOL_VERSION
        )
        if slot is None or not is_ours:
            self._send(peer, Rejected("this dispatcher did not start you"))
            return
        slot.peer = peer
        self._slots[peer] = slot

    def _to_worker(self, worker: int, message: Message, payloads: list[bytes] | None = None) -> None:
        peer = self._roster.slots[worker].peer
        if peer is not None:
            self._send(peer, message, payloads)

    def _send(self, peer: bytes, message: Message, payloads: list[bytes] | None = None) -> None:
        """A send to a worker that has just died is not an error: its exit puts the items back."""
        self.router.send(peer, [encode(message), *(payloads or ())])

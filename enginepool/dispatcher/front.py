"""The front: clients come in here, are checked, and get their results in as few messages as the moment allows.

A client that does not read its results is paused: once what waits for it is over a bound, the backlog hands out no more of
its items until half of that has gone. For a peer that was not let in nothing is ever kept.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable

import msgspec

from enginepool.clock import monotonic
from enginepool.dispatcher.backlog import ClientId, Item
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.session import Session
from enginepool.errors import Code, ItemError
from enginepool.presence import Presence
from enginepool.protocol import (
    PROTOCOL_VERSION,
    UNREADABLE,
    Abort,
    Bye,
    ClientMessage,
    Drain,
    GetStatus,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Rejected,
    ResultItem,
    Status,
    Stop,
    Stopping,
    Submit,
    Welcome,
    decode_from_client,
    decode_hello,
    encode,
)
from enginepool.status import PoolStatus
from enginepool.transport import Router

FRAMES_A_TURN = 4096
MESSAGE_COST = 16
MAX_HELLO_BYTES = 4096
MAX_CLIENT_ID_BYTES = 64
MAX_REASON = 300
MAX_LIMIT_S = 1e9


class Front:
    """Serves the clients' socket. The hooks tell the loop what only it can do."""

    def __init__(
        self,
        router: Router,
        welcome: Welcome,
        secret: bytes,
        *,
        get_status: Callable[[], PoolStatus],
        on_drain: Callable[[float | None], None],
        on_stop: Callable[[], None],
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        warn: Callable[[str], None],
        max_output_bytes: int,
    ) -> None:
        self.router = router
        self.desk: Desk | None = None
        self._welcome = welcome
        self._secret = secret
        self._get_status = get_status
        self._on_drain = on_drain
        self._on_stop = on_stop
        self._watch = watch
        self._unwatch = unwatch
        self._warn = warn
        self._max_output_bytes = max_output_bytes
        self._max_header_bytes = max(1 << 20, 64 * welcome.limits.max_items_per_message)
        self._status: PoolStatus | None = None
        self._paused: dict[bytes, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._by_client: dict[ClientId, Session] = {}
        self._by_id: dict[bytes, Session] = {}
        self._numbers = itertools.count()
        self._with_results: dict[bytes, Session] = {}
        self._remote = Presence[bytes](welcome.silence_s)

    @property
    def num_clients(self) -> int:
        """How many clients are connected."""
        return len(self._by_peer)

    @property
    def num_paused(self) -> int:
        """How many of them do not read their results."""
        return len(self._paused)

    def receive(self) -> None:
        """Handle what has arrived, a bounded number of frames at a time; each message is stamped as it is read."""
        self._status = None
        left = FRAMES_A_TURN
        while left > 0 and (received := self.router.receive()) is not None:
            peer, frames = received
            left -= MESSAGE_COST + len(frames)
            if frames:
                self._read(peer, frames)

    def deliver(self, item: Item, payload: bytes, error: ItemError | None, stamps: msgspec.Raw) -> None:
        """Collect a result for its client; `flush` sends it."""
        session = self._by_client.get(item.client)
        if session is None:
            return
        session.results.append(ResultItem(item.seq, item.last_worker, item.attempts, item.received, item.leased, error, stamps))
        session.payloads.append(payload)
        self._with_results[session.peer] = session

    def deliver_delta(self, item: Item, payload: bytes) -> None:
        """Collect what is new in a stream; `flush` sends it before any result."""
        session = self._by_client.get(item.client)
        if session is not None:
            session.streams.append(item.seq)
            session.deltas.append(payload)
            self._with_results[session.peer] = session

    def flush(self) -> None:
        """Send what was collected, one message a client and kind (or as many as its size limits need)."""
        sessions, self._with_results = self._with_results, {}
        for session in sessions.values():
            for message, payloads in session.take(self._welcome.limits.max_items_per_message):
                self._send(session, message, payloads)

    def settle(self, now: float) -> None:
        """Try again what clients have not taken; those that have read on get work again."""
        for peer in self.router.flush(now):
            self._drop(self._by_peer.get(peer))
        for session in list(self._paused.values()):
            if self.router.queued_bytes(session.peer) <= self._max_output_bytes // 2:
                self._resume(session)

    def say_farewell(self, exit_code: int, num_returned: int) -> None:
        """Tell everybody that the pool ends on its own account."""
        for session in list(self._by_peer.values()):
            self._send(session, Stopping(exit_code, num_returned))

    def drop_silent(self, now: float) -> None:
        """Let go of clients on other machines that have not been heard for too long; local ones are watched by pid."""
        self._remote.advance(now)
        for peer in self._remote.silent():
            self._cut_off(peer, f"nothing came from this client for {self._remote.limit_s:g} s, so it was taken for gone; connect again")

    def _read(self, peer: bytes, frames: list[bytes]) -> None:
        session, header = self._by_peer.get(peer), frames[0]
        message: ClientMessage
        try:
            if session is None:
                message = _read_hello(header)
            elif len(header) > self._max_header_bytes:
                raise msgspec.DecodeError(f"a header of {len(header)} bytes")
            else:
                message = decode_from_client(header)
        except UNREADABLE as error:
            self._cut_off(peer, f"a message could not be read: {error}" if session else str(error))
            return
        if isinstance(message, Hello):
            self._let_in(peer, message)
        elif session is not None:
            self._handle(session, message, frames[1:], monotonic())

    def _handle(self, session: Session, message: ClientMessage, payloads: list[bytes], now: float) -> None:
        if not isinstance(message, GetStatus | Ping):
            self._status = None
        if session.pid is None:
            self._remote.heard(session.peer)
        match message:
            case Submit():
                self._submit(session, message, payloads, now)
            case Abort(ids):
                self._the_desk.abort(session.client, ids)
            case GetStatus(token):
                self._status = self._status or self._get_status()
                self._answer(session, Status(token, self._status))
            case Ping(token):
                self._answer(session, Pong(token, now))
            case Drain(limit_s) if limit_s is None or 0 <= limit_s <= MAX_LIMIT_S:
                self._on_drain(limit_s)
            case Drain(limit_s):
                self._cut_off(session.peer, f"a drain's limit_s is a number of seconds, not {limit_s}")
            case Stop():
                self._on_stop()
            case Bye():
                self._drop(session)

    @property
    def _the_desk(self) -> Desk:
        assert self.desk is not None
        return self.desk

    def _let_in(self, peer: bytes, hello: Hello) -> None:
        other = self._by_id.get(hello.client_id)
        if hello.version != PROTOCOL_VERSION:
            text = f"this pool speaks protocol {PROTOCOL_VERSION}, the client {hello.version}; use the same enginepool version"
            self._cut_off(peer, text)
        elif not hmac.compare_digest(hello.secret, self._secret):
            self._cut_off(peer, "the secret is not this pool's: the endpoint belongs to another pool now")
        elif not 1 <= len(hello.client_id) <= MAX_CLIENT_ID_BYTES:
            self._cut_off(peer, f"a client_id has 1 to {MAX_CLIENT_ID_BYTES} bytes, not {len(hello.client_id)}")
        elif other is not None and other.peer != peer:
            self._cut_off(peer, "another connection has this client_id; each needs one of its own")
        else:
            self._drop(self._by_peer.get(peer))
            try:
                session = Session(peer, hello.client_id, hello.pid, next(self._numbers))
            except OSError as error:
                self._cut_off(peer, f"the dispatcher can not watch one more client: {error.strerror}; raise its limit of open files")
                return
            self._by_peer[peer] = self._by_client[session.client] = self._by_id[session.client_id] = session
            if session.pid is None:
                self._remote.heard(peer)
            if session.pidfd is not None:
                self._watch(session.pidfd, lambda: self._drop(session))
            self._send(session, self._welcome)

    def _submit(self, session: Session, message: Submit, payloads: list[bytes], now: float) -> None:
        limits = self._welcome.limits
        error: ItemError | None
        if len(message.items) != len(payloads):
            error = ItemError(Code.INVALID_REQUEST, f"{len(message.items)} items came with {len(payloads)} payload frames")
        elif len(payloads) > limits.max_items_per_message:
            error = ItemError(Code.INVALID_REQUEST, f"at most {limits.max_items_per_message} items a message, not {len(payloads)}")
        else:
            error = self._the_desk.submit(session.client, message.items, payloads, now)
        if error is not None:
            self._answer(session, Refused([item.seq for item in message.items], error))

    def _drop(self, session: Session | None) -> None:
        """The client is gone or said goodbye: abort what it still has."""
        if session is None or self._by_peer.get(session.peer) is not session:
            return
        del self._by_peer[session.peer], self._by_client[session.client], self._by_id[session.client_id]
        self._the_desk.drop_client(session.client)
        self._the_desk.backlog.resume(session.client)
        self._paused.pop(session.peer, None)
        self._with_results.pop(session.peer, None)
        self._remote.forget(session.peer)
        self.router.forget(session.peer)
        if session.pidfd is not None:
            self._unwatch(session.pidfd)
        session.close()

    def _cut_off(self, peer: bytes, reason: str) -> None:
        self._drop(self._by_peer.get(peer))
        self.router.send_or_drop(peer, [encode(Rejected(reason[:MAX_REASON]))])

    def _answer(self, session: Session, message: Message) -> None:
        """Answers can not be held back like items, so who asks and asks without reading is cut off in the end."""
        if session.is_paused:
            session.num_asked_bytes += len(encode(message))
            if session.num_asked_bytes > self._max_output_bytes:
                self._cut_off(session.peer, "this client asks without reading the answers; connect again")
                return
        self._send(session, message)

    def _send(self, session: Session, message: Message, payloads: list[bytes] | None = None) -> None:
        if not self.router.send(session.peer, [encode(message), *(payloads or ())]):
            self._drop(session)
        elif not session.is_paused and self.router.queued_bytes(session.peer) > self._max_output_bytes:
            self._pause(session)

    def _pause(self, session: Session) -> None:
        session.is_paused, session.num_asked_bytes = True, 0
        self._paused[session.peer] = session
        self._the_desk.backlog.pause(session.client)
        if not session.was_paused:
            session.was_paused = True
            name = f"the client with pid {session.pid}" if session.pid else "a client"
            self._warn(f"{name} does not read its results; its other items are held back until it does (max_client_output_bytes)")

    def _resume(self, session: Session) -> None:
        session.is_paused = False
        del self._paused[session.peer]
        self._the_desk.backlog.resume(session.client)


def _read_hello(header: bytes) -> Hello:
    """Of a stranger nothing but a Hello is decoded, and none larger than one can be."""
    try:
        if len(header) <= MAX_HELLO_BYTES:
            return decode_hello(header)
    except UNREADABLE:
        pass
    raise msgspec.DecodeError("the first message must be a Hello with this pool's secret")

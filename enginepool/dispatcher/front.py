"""The front: clients come in here, are checked, and get their results in as few messages as the moment allows."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

import msgspec

from enginepool.clock import monotonic
from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.desk import Desk
from enginepool.errors import Code, ItemError
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    ClientMessage,
    Delta,
    Drain,
    GetStatus,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Rejected,
    Result,
    ResultItem,
    Status,
    Stop,
    Stopping,
    Submit,
    Welcome,
    decode_from_client,
    encode,
)
from enginepool.status import PoolStatus
from enginepool.transport import Router

MAX_MESSAGES_A_TURN = 256


class Session:
    """One client that was let in."""

    def __init__(self, peer: bytes, client_id: bytes, pid: int | None, pidfd: int | None) -> None:
        self.peer = peer
        self.client_id = client_id
        self.pid = pid
        self.pidfd = pidfd
        self.results: list[ResultItem] = []
        self.payloads: list[bytes] = []
        self.streams: list[int] = []
        self.deltas: list[bytes] = []


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
        self._by_peer: dict[bytes, Session] = {}
        self._by_client: dict[bytes, Session] = {}
        self._with_results: dict[bytes, Session] = {}

    @property
    def num_clients(self) -> int:
        """How many clients are connected."""
        return len(self._by_peer)

    def receive(self) -> None:
        """Handle what has arrived, a bounded number of messages at a time; each is stamped as it is read."""
        for _ in range(MAX_MESSAGES_A_TURN):
            received = self.router.receive()
            if received is None:
                return
            peer, frames = received
            try:
                message = decode_from_client(frames[0]) if frames else None
            except msgspec.DecodeError as error:
                self._cut_off(peer, f"a message could not be read: {error}")
                continue
            if message is not None:
                self._handle(peer, message, frames[1:], monotonic())

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
        """Send what was collected, one message a client and kind (or as many as its size limit needs)."""
        sessions, self._with_results = self._with_results, {}
        step = self._welcome.limits.max_items_per_message
        for peer, session in sessions.items():
            streams, deltas, results, payloads = session.streams, session.deltas, session.results, session.payloads
            session.streams, session.deltas, session.results, session.payloads = [], [], [], []
            for start in range(0, len(streams), step):
                part = slice(start, start + step)
                self._send(peer, Delta(streams[part]), deltas[part])
            for start in range(0, len(results), step):
                part = slice(start, start + step)
                self._send(peer, Result(results[part]), payloads[part])

    def say_farewell(self, exit_code: int, num_returned: int) -> None:
        """Tell everybody that the pool ends on its own account."""
        for peer in list(self._by_peer):
            self._send(peer, Stopping(exit_code, num_returned))

    def _handle(self, peer: bytes, message: ClientMessage, payloads: list[bytes], now: float) -> None:
        if isinstance(message, Hello):
            self._let_in(peer, message)
            return
        session = self._by_peer.get(peer)
        if session is None:
            self._send(peer, Rejected("the first message must be a Hello with this pool's secret"))
            return
        match message:
            case Submit():
                self._submit(session, message, payloads, now)
            case Abort(ids):
                self._the_desk.abort(session.client_id, ids)
            case GetStatus(token):
                self._send(peer, Status(token, self._get_status()))
            case Ping(token):
                self._send(peer, Pong(token))
            case Drain(limit_s):
                self._on_drain(limit_s)
            case Stop():
                self._on_stop()
            case Bye():
                self._drop(session)

    @property
    def _the_desk(self) -> Desk:
        assert self.desk is not None
        return self.desk

    def _let_in(self, peer: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            text = f"this pool speaks protocol {PROTOCOL_VERSION}, the client {hello.version}; use the same enginepool version"
            self._send(peer, Rejected(text))
        elif not hmac.compare_digest(hello.secret, self._secret):
            self._send(peer, Rejected("the secret is not this pool's: the endpoint belongs to another pool now"))
        else:
            if (before := self._by_peer.get(peer)) is not None:
                self._drop(before)
            pidfd = _open_pidfd(hello.pid)
            session = Session(peer, hello.client_id, hello.pid, pidfd)
            self._by_peer[peer] = self._by_client[hello.client_id] = session
            if pidfd is not None:
                self._watch(pidfd, lambda: self._drop(session))
            self._send(peer, self._welcome)

    def _submit(self, session: Session, message: Submit, payloads: list[bytes], now: float) -> None:
        limits = self._welcome.limits
        error: ItemError | None
        if len(message.items) != len(payloads):
            error = ItemError(Code.INVALID_REQUEST, f"{len(message.items)} items came with {len(payloads)} payload frames")
        elif len(payloads) > limits.max_items_per_message:
            error = ItemError(Code.INVALID_REQUEST, f"at most {limits.max_items_per_message} items a message, not {len(payloads)}")
        else:
            error = self._the_desk.submit(session.client_id, message.items, payloads, now)
        if error is not None:
            self._send(session.peer, Refused([item.seq for item in message.items], error))

    def _drop(self, session: Session) -> None:
        """The client is gone or said goodbye: abort what it still has."""
        if self._by_peer.pop(session.peer, None) is None:
            return
        if self._by_client.get(session.client_id) is session:
            del self._by_client[session.client_id]
            self._the_desk.drop_client(session.client_id)
        self._with_results.pop(session.peer, None)
        self.router.forget(session.peer)
        if session.pidfd is not None:
            self._unwatch(session.pidfd)
            os.close(session.pidfd)

    def _cut_off(self, peer: bytes, reason: str) -> None:
        self._send(peer, Rejected(reason))
        session = self._by_peer.get(peer)
        if session is not None:
            self._drop(session)

    def _send(self, peer: bytes, message: Message, payloads: list[bytes] | None = None) -> None:
        """A peer whose queue is full has not read for a very long time: it is dropped like one that is gone."""
        is_taken = self.router.send(peer, [encode(message), *(payloads or ())])
        session = None if is_taken else self._by_peer.get(peer)
        if session is not None:
            self._drop(session)
            text = "this client has not read its results for so long that its queue was full, and was dropped; connect again"
            self.router.send(peer, [encode(Rejected(text))])


def _open_pidfd(pid: int | None) -> int | None:
    try:
        return None if pid is None else os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None

"""The connection: one thread that receives for all callers and knows nothing of the Pool in front of it.

Callers send for themselves; results go from the receiving thread straight to whoever waits. It watches the dispatcher
by pidfd, so a dispatcher that dies is noticed at once and nobody waits for ever.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from enginepool.client.changes import Changes
from enginepool.client.pending import Pending
from enginepool.client.tether import Tether
from enginepool.client.ticket import Sink, Ticket
from enginepool.client.way import find_way
from enginepool.clock import monotonic
from enginepool.errors import EnginePoolError, ForkedPool, NoDispatcher, PoolClosed, PoolLost
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Delta,
    GetStatus,
    Hello,
    Message,
    Pong,
    Refused,
    Rejected,
    Result,
    Status,
    Stopping,
    Submit,
    SubmitItem,
    ToClient,
    Welcome,
    decode_to_client,
    encode,
)
from enginepool.status import PoolStatus
from enginepool.transport import Dealer

LOSS_GRACE_S = 0.3
HELLO_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 10.0
OWNER_CHECK_S = 1.0
ABORTS_A_MESSAGE = 10_000


class Connection:
    """One client of one pool. All public methods may be called from any thread."""

    def __init__(
        self, endpoint: str, timeout_s: float = HELLO_TIMEOUT_S, *, keys: str | os.PathLike[str] | None = None, waits: bool = True
    ) -> None:
        """Connect, and wait until the pool has let this client in; with `waits=False` do that by `is_settled` and `refusal`."""
        self.endpoint = endpoint
        self.way = find_way(endpoint, keys)
        self.welcome: Welcome
        self.changes = Changes()
        self._owner_pid = os.getpid()
        self._seqs = itertools.count()
        self._pending = Pending()
        self._answers: dict[int, deque[PoolStatus]] = {}
        self._dealer = Dealer(self.way.address, keys=self.way.keys)
        self._tether = Tether(self.way, self._dealer)
        self._pidfd: int | None = None
        self._error: EnginePoolError | None = None
        self.farewell: Stopping | None = None
        self._is_closing = False
        self._is_ended = False
        self._has_exited = False
        self._longest_wait_s: float | None = None
        self._is_owner_gone: Callable[[], bool] = lambda: False
        self._release: Callable[[], None] = lambda: None
        self._num_calls = 0
        self._is_welcome = threading.Event()
        self._thread = threading.Thread(target=self._run, name="enginepool-client", daemon=True)
        self._thread.start()
        if waits:
            self._is_welcome.wait(timeout_s)
            if error := self.refusal():
                self.close()
                raise error

    @property
    def is_settled(self) -> bool:
        """Whether the pool has let this client in, or will not."""
        return self._is_welcome.is_set()

    def refusal(self) -> EnginePoolError | None:
        """Why the pool has not let this client in, or None."""
        if self._is_welcome.is_set():
            return self.error
        return NoDispatcher(f"the pool at {self.endpoint} does not answer; {self._tether.hint}")

    @property
    def address(self) -> str:
        """Where others on this machine find the pool: by its own name for its endpoint, or as this client has found it."""
        return self.welcome.endpoint if self.way.is_local else self.endpoint

    @property
    def is_foreign(self) -> bool:
        """Whether this is a child that was forked from the process that connected; ZeroMQ does not work there."""
        return os.getpid() != self._owner_pid

    @property
    def num_pending(self) -> int:
        """Items that have not ended."""
        return len(self._pending)

    @property
    def error(self) -> EnginePoolError | None:
        """Why the connection is of no use any more, or None."""
        return self._error

    def next_seq(self) -> int:
        """A number for a new item."""
        return next(self._seqs)

    def submit(self, tickets: Sequence[Ticket], items: list[SubmitItem], frames: Sequence[bytes]) -> None:
        """Send items. Raises PoolLost when the pool is gone, PoolClosed after `close`."""
        self._check()
        header = encode(Submit(items))
        self._pending.add(tickets)
        if self.error is not None:  # lost between the check and here: the I/O thread may not have seen these tickets
            self._pending.forget([ticket.seq for ticket in tickets])
            self._check()
        try:
            self._dealer.send([header, *frames])
        except BaseException:  # interrupted: the pool may have them or not
            self.give_up([ticket.seq for ticket in tickets])
            raise

    def give_up_of(self, sink: Sink) -> None:
        """The same for all items whose results would go to this sink (an interrupted caller may not know their numbers)."""
        self.give_up(self._pending.of_sink(sink))

    def give_up(self, seqs: Iterable[int]) -> None:
        """Nobody wants these items any more: end them and drop what still comes. Never waits, so finalizers may call it."""
        if self.is_foreign:
            return
        self._abort(self._pending.forget(seqs))

    def _abort(self, seqs: list[int]) -> None:
        if self._error is None and not self._is_closing:
            for start in range(0, len(seqs), ABORTS_A_MESSAGE):
                self._dealer.send_soon([encode(Abort(seqs[start : start + ABORTS_A_MESSAGE]))])

    def post(self, message: Message, *, even_if_abandoned: bool = False) -> None:
        """Send a message that has no answer."""
        if not (even_if_abandoned and isinstance(self.error, PoolClosed)):
            self._check()
        self._dealer.send_soon([encode(message)])

    def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> PoolStatus:
        """Ask the dispatcher for its status. Raises PoolLost when it is gone or silent."""
        with self.asked() as question:
            self.changes.wait_until(lambda: question.is_over, timeout_s)
            return question.answer()

    @contextmanager
    def asked(self) -> Iterator[Question]:
        """Ask for the status; the question knows when there is an answer."""
        self._check()
        token = next(self._seqs)
        answers = self._answers[token] = deque()
        try:
            self._dealer.send([encode(GetStatus(token))])
            yield Question(self, answers)
        finally:
            self._answers.pop(token, None)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that has items still to submit: `is_idle` counts it too."""
        with self.changes.lock:
            self._num_calls += 1
        try:
            yield
        finally:
            with self.changes.lock:
                self._num_calls -= 1
            self.changes.tell()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending and no call runs, or nothing can come any more."""
        return (not self._pending and not self._num_calls) or self._error is not None

    @property
    def is_ended(self) -> bool:
        """Whether the receiving thread has nothing left to do."""
        return self._is_ended

    def abandon(self) -> None:
        """End all that waits with PoolClosed, from whatever thread."""
        self._lose(PoolClosed("the pool was closed while calls were waiting"))

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the receiving thread, which must not wait for what only it can receive."""
        return threading.current_thread() is self._thread

    @property
    def is_lost(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None

    def watch_owner(self, is_gone: Callable[[], bool], release: Callable[[], None]) -> None:
        """Look now and then whether the owner has gone without a word (its event loop is closed), and then call `release`."""
        self._is_owner_gone, self._release, self._longest_wait_s = is_gone, release, OWNER_CHECK_S
        self._dealer.wake()

    def begin_close(self) -> None:
        """Say goodbye and let the thread end; whoever still waits gets PoolClosed."""
        if not self._is_closing:
            self._is_closing = True
            with suppress(OSError):
                self._dealer.wake()

    def close(self) -> None:
        """The same, and wait for the thread's end, unless that waits for a send which this very call has interrupted."""
        self.begin_close()
        if not self.is_own_thread and not self._dealer.is_interrupted_here:
            self._thread.join(5)
            if self._is_ended:
                self._dealer.release()

    @property
    def _is_gone(self) -> bool:
        """Whether nobody is at the other end; a goodbye would only be waited for in vain."""
        return self._has_exited or (self.error is not None and not isinstance(self.error, PoolClosed))

    def _check(self) -> None:
        if self.is_foreign:
            raise ForkedPool("this pool belongs to the parent process; in a forked child use Pool.connect(endpoint)")
        if error := self.error:
            raise error
        if self._is_closing:
            raise PoolClosed("the pool is closed")

    def _run(self) -> None:
        pid = os.getpid() if self.way.is_local else None
        self._dealer.send([encode(Hello(PROTOCOL_VERSION, self.way.secret, uuid.uuid4().bytes, pid))])
        try:
            self._serve()
        finally:
            is_gone = self._is_gone
            self.abandon()
            self._dealer.close(linger_ms=0 if is_gone else 1000)
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._is_ended = True
            self.changes.tell()

    def _serve(self) -> None:
        lost_at: float | None = None
        while not self._is_closing:
            readable = self._dealer.wait(self._wait_s if lost_at is None else 0.02)
            if self._is_owner_gone():
                self._release()
                break
            if self._pidfd in readable and self._pidfd is not None:
                self._dealer.unwatch(self._pidfd)
                self._has_exited, lost_at = True, monotonic()
            self._tether.look()
            has_news = self._receive()
            if self._error is None and (gone := self._tether.judge(has_news=has_news)):
                self._lose(gone if self.farewell is None else PoolLost(self._what_was_lost()))
            if lost_at is not None and monotonic() - lost_at > LOSS_GRACE_S:
                self._lose(PoolLost(self._what_was_lost()))
                lost_at = None
        if not self._is_gone:
            self._dealer.send([encode(Bye())])

    @property
    def _wait_s(self) -> float | None:
        waits = [wait_s for wait_s in (self._longest_wait_s, self._tether.wait_s) if wait_s is not None]
        return min(waits, default=None)

    def _what_was_lost(self) -> str:
        if self.farewell is not None:
            return f"the pool at {self.endpoint} has stopped, as it was asked to"
        return f"the pool's dispatcher (pid {self.welcome.pid}) at {self.endpoint} is gone; start it again"

    def _receive(self) -> bool:
        """Read all that has come; True when there was something."""
        is_news = False
        while (frames := self._dealer.receive()) is not None:
            try:
                self._take(decode_to_client(frames[0]), frames[1:])
            except Exception as error:
                self._lose(PoolLost(f"the pool at {self.endpoint} sent a message that this version does not understand: {error}"))
            is_news = True
        if is_news:
            self.changes.tell()
        return is_news

    def _take(self, message: ToClient, frames: list[bytes]) -> None:
        match message:
            case Delta(seqs):
                self._abort(self._pending.add_deltas(seqs, frames, self.welcome.anchor))
            case Result(items):
                self._pending.finish(items, frames, self.welcome.anchor)
            case Welcome():
                self._on_welcome(message)
            case Refused(seqs, error):
                self._pending.refuse(seqs, error, self.welcome.anchor)
            case Status(token, status):
                self._answers.get(token, deque()).append(status)
            case Rejected(reason):
                kind = PoolLost if self.is_settled else NoDispatcher
                self._lose(kind(f"the pool at {self.endpoint} refused this client: {reason}"))
            case Stopping():
                self.farewell = message
            case Pong():
                self._on_pong(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        self.welcome = welcome
        if self.way.is_local:
            with suppress(OSError):
                self._pidfd = os.pidfd_open(welcome.pid)
                self._dealer.watch(self._pidfd)
        if self._tether.welcomed(welcome):
            self._is_welcome.set()

    def _on_pong(self, pong: Pong) -> None:
        if not self._tether.is_far:
            return
        self.welcome = msgspec.structs.replace(self.welcome, anchor=self._tether.ponged(pong, self.welcome.anchor))
        self._is_welcome.set()

    def _lose(self, error: EnginePoolError) -> None:
        self._error = self._error or error
        self._pending.lose(self._error)
        self._is_welcome.set()
        self.changes.tell()


class Question:
    """One request for the status."""

    def __init__(self, connection: Connection, answers: deque[PoolStatus]) -> None:
        self._connection = connection
        self._answers = answers

    @property
    def is_over(self) -> bool:
        """Whether the answer is there or will not come."""
        return bool(self._answers) or self._connection.is_lost

    def answer(self) -> PoolStatus:
        """The status. Raises PoolLost when none came."""
        if not self._answers:
            raise self._connection.error or PoolLost(f"the pool at {self._connection.endpoint} did not answer in time")
        return self._answers[0]

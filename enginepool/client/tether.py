"""What tells a client that its pool is out of reach where no pid can: how a tcp connection fares, and silence across machines."""

from __future__ import annotations

from enginepool.client.link import Link
from enginepool.client.pulse import Pulse
from enginepool.client.way import Way
from enginepool.clock import ClockAnchor, monotonic
from enginepool.errors import EnginePoolError, NoDispatcher, PoolLost
from enginepool.protocol import Pong, Welcome, encode
from enginepool.transport import Dealer

UNWELCOME_S = 0.5
"""How often to look whether the dispatcher still holds its endpoint, as long as no pid can be watched."""


class Tether:
    """Used by the receiving thread at each of its turns: `look`, read what has come, `judge`. Idle for a local ipc pool."""

    def __init__(self, way: Way, dealer: Dealer) -> None:
        self._way = way
        self._dealer = dealer
        self._link = Link(has_keys=way.keys is not None) if way.address.startswith("tcp://") else None
        self._pulse: Pulse | None = None
        self._refusal: str | None = None
        self._is_welcome = False

    @property
    def wait_s(self) -> float | None:
        """How long the receiving thread may sleep; None: for ever."""
        if not self._is_welcome:
            return UNWELCOME_S
        return None if self._pulse is None else self._pulse.interval_s

    @property
    def is_far(self) -> bool:
        """Whether the pool that let this client in is on another machine."""
        return self._pulse is not None

    @property
    def hint(self) -> str:
        """Why there may be no answer yet."""
        return "is its dispatcher alive? (enginepool status)" if self._link is None else self._link.hint()

    def look(self) -> None:
        """See how the connection fares. Comes before reading, so that what was sent before a break is read before it counts."""
        if self._link is not None:
            self._refusal = self._link.follow(self._dealer.link_events()) or self._refusal

    def judge(self, *, has_news: bool) -> EnginePoolError | None:
        """Ping when it is due; returns why the pool is out of reach, or None."""
        if not self._is_welcome and self._way.is_abandoned:
            return NoDispatcher(f"the pool at {self._way.endpoint} has gone before it let this client in; start it again")
        if self._refusal is not None:
            return NoDispatcher(f"the pool at {self._way.endpoint} does not let this client in: {self._refusal}")
        if self._pulse is None:
            return None
        if ping := self._pulse.beat(monotonic(), has_news=has_news):
            self._dealer.send([encode(ping)])
        if self._link is not None and self._link.is_broken:
            return PoolLost(
                f"the connection to the pool at {self._way.endpoint} broke: its dispatcher or the network has gone; connect again"
            )
        if self._pulse.is_lost:
            return PoolLost(
                f"nothing came from the pool at {self._way.endpoint} for {self._pulse.limit_s:g} s; connect again once it answers"
            )
        return None

    def welcomed(self, welcome: Welcome) -> bool:
        """The pool lets this client in; False when the client has still to learn how the other machine's clock goes."""
        self._is_welcome = True
        if not self._way.is_local:
            self._pulse = Pulse(welcome.silence_s)
        return self._way.is_local

    def ponged(self, pong: Pong, anchor: ClockAnchor) -> ClockAnchor:
        """A Pong has come; returns the pool's anchor as this machine's clock sees it."""
        assert self._pulse is not None
        self._pulse.answered(pong.token, pong.at, monotonic())
        return anchor if self._pulse.ahead is None else anchor.seen_from(*self._pulse.ahead)

"""The pulse of a connection to another machine: pings about once a second, and a pool that has been silent for too long."""

from __future__ import annotations

import itertools

from enginepool.client.far_clock import FarClock
from enginepool.presence import Presence
from enginepool.protocol import DEFAULT_SILENCE_S, Ping

BEATS = 15
"""Pings in the time after which a silent peer is taken for gone."""


class Pulse:
    """Knows when to ping and what the answers tell; pure. One pool is watched, so its peer has no name."""

    def __init__(self, silence_s: float = DEFAULT_SILENCE_S) -> None:
        self.limit_s = silence_s
        self.interval_s = silence_s / BEATS
        self._presence = Presence[None](silence_s)
        self._presence.heard(None)
        self._clock = FarClock()
        self._tokens = itertools.count()
        self._due = 0.0

    def beat(self, now: float, *, has_news: bool) -> Ping | None:
        """A turn of the receiving thread; returns the ping that is due."""
        self._presence.advance(now)
        if has_news:
            self._presence.heard(None)
        if now < self._due:
            return None
        self._due = now + self.interval_s
        ping = Ping(next(self._tokens))
        self._clock.sent(ping.token, now)
        return ping

    @property
    def is_lost(self) -> bool:
        """Whether nothing has come for longer than the limit, counted while this program ran."""
        return bool(self._presence.silent())

    def answered(self, token: int, at: float | None, now: float) -> None:
        """A Pong has come."""
        if at is not None:
            self._clock.answered(token, at, now)

    @property
    def ahead(self) -> tuple[float, float] | None:
        """How far this machine's clock is ahead of the pool's and how far off that may be, in seconds; None if it isn't known."""
        return self._clock.best

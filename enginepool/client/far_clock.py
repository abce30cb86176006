"""How far this client's monotonic clock is ahead of a pool's on another machine, learnt from pings; pure."""

from __future__ import annotations

from collections import deque

MAX_ROUNDS = 60


class FarClock:
    """The pool's stamp of an answer lies between the sending and the return: the quickest of the last rounds tells most."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}
        self._rounds: deque[tuple[float, float]] = deque(maxlen=MAX_ROUNDS)

    def sent(self, token: int, now: float) -> None:
        """A ping leaves."""
        self._sent[token] = now
        while len(self._sent) > MAX_ROUNDS:
            del self._sent[next(iter(self._sent))]

    def answered(self, token: int, at: float, now: float) -> None:
        """Its answer is back; the pool's own clock showed `at`."""
        sent = self._sent.pop(token, None)
        if sent is not None:
            self._rounds.append(((now - sent) / 2, (now + sent) / 2 - at))

    @property
    def best(self) -> tuple[float, float] | None:
        """Seconds ahead, and how many seconds that may be off by; None before the first answer."""
        if not self._rounds:
            return None
        uncertainty_s, ahead_s = min(self._rounds)
        return ahead_s, uncertainty_s

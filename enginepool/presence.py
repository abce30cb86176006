"""Who has been silent for too long: pure, and counts silence only while the process that listens ran itself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)
LONGEST_TURN_S = 1.0


class Presence(Generic[Peer]):
    """An own clock that a listener moves at each of its turns, by a second at most, and when each peer was heard last on it.

    A process that was stopped, or whose machine slept, finds its clock where it left it: it has heard nobody because it
    did not listen.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._longest_turn_s = min(LONGEST_TURN_S, limit_s / 3)
        self._clock_s = 0.0
        self._turned_at: float | None = None
        self._heard: dict[Peer, float] = {}

    def advance(self, now: float) -> None:
        """A turn begins or goes on; `now` is monotonic, in seconds."""
        if self._turned_at is not None:
            self._clock_s += min(max(0.0, now - self._turned_at), self._longest_turn_s)
        self._turned_at = now

    def heard(self, peer: Peer) -> None:
        """Something came from this peer, or it is new."""
        self._heard[peer] = self._clock_s

    def forget(self, peer: Peer) -> None:
        """The peer has gone."""
        self._heard.pop(peer, None)

    def silent(self) -> list[Peer]:
        """Whoever was not heard for longer than the limit."""
        return [peer for peer, heard_s in self._heard.items() if self._clock_s - heard_s > self.limit_s]

"""The doorkeeper of an encrypted endpoint: answers who may come in, and tells of those who may not, without flooding the log."""

from __future__ import annotations

from collections.abc import Callable

from enginepool.clock import monotonic
from enginepool.curve import Door

TELL_EVERY_S = 10.0


class Doorkeeper:
    """Serves the door in the dispatcher's own loop."""

    def __init__(self, door: Door, warn: Callable[[str], None]) -> None:
        self._door = door
        self._warn = warn
        self._num_refused = 0
        self._told_at = float("-inf")

    def answer(self) -> None:
        """Answer those who wait."""
        refused, now = self._door.answer(), monotonic()
        self._num_refused += len(refused)
        if refused and now - self._told_at >= TELL_EVERY_S:
            times = "" if self._num_refused == 1 else f" ({self._num_refused} times since this was last told)"
            self._warn(f"refused a client at {refused[-1]}: its key is not known{times}")
            self._num_refused, self._told_at = 0, now

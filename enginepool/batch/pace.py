"""How fast a run goes now, and so how long it still takes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 20.0
STEP_S = 0.5
MIN_LINES = 8


class Mark(NamedTuple):
    """What had ended in this run at a moment (monotonic seconds)."""

    at: float
    lines: int
    tokens: int


class Pace:
    """Rates over the last WINDOW_S, or over the whole run while too little has ended within it. Time is an argument."""

    def __init__(self, now: float) -> None:
        self.started = now
        self._marks: deque[Mark] = deque([Mark(now, 0, 0)])
        self._last = self._marks[0]

    def update(self, now: float, lines: int, tokens: int) -> None:
        """Take totals of this run, those of earlier runs not among them."""
        self._last = Mark(now, lines, tokens)
        if now - self._marks[-1].at >= STEP_S:
            self._marks.append(self._last)
        while len(self._marks) > 1 and now - self._marks[1].at >= WINDOW_S:
            self._marks.popleft()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._last.at - self.started

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the lines that ended lately."""
        return self._rate(self._last.tokens - self._since.tokens)

    @property
    def lines_per_s(self) -> float:
        """Lines that ended lately."""
        return self._rate(self._last.lines - self._since.lines)

    @property
    def mean_tokens_per_s(self) -> float:
        """Tokens of the lines that ended, over the whole run."""
        return self._last.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def left_s(self, lines_left: int) -> float | None:
        """Seconds that so many lines will take; None while nothing has ended."""
        if lines_left <= 0:
            return 0.0
        rate = self.lines_per_s
        return lines_left / rate if rate > 0 else None

    @property
    def _since(self) -> Mark:
        """Where the window begins: a few long lines in it would tell nothing."""
        oldest = self._marks[0]
        return oldest if self._last.lines - oldest.lines >= MIN_LINES else Mark(self.started, 0, 0)

    def _rate(self, amount: int) -> float:
        span = self._last.at - self._since.at
        return amount / span if span > 0 else 0.0

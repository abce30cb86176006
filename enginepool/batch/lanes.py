"""Lanes of a timeline on which spans that come in the order of their ends never overlap."""

from __future__ import annotations

from bisect import bisect_right, insort
from math import inf


class Lanes:
    """Gives each span the lane that was last used shortest before it begins.

    Spans in the order of their ends take as many lanes as there are spans at one moment, no more; a span out of that order may
    take one more, but never overlaps. What is remembered is one end a lane.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def place(self, start: float, end: float) -> tuple[int, bool]:
        """The lane of a span, and whether it is a new one."""
        at = bisect_right(self._ends, (start, inf)) - 1
        is_new = at < 0
        lane = len(self._ends) if is_new else self._ends.pop(at)[1]
        insort(self._ends, (max(start, end), lane))
        return lane, is_new

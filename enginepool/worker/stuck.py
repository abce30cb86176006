"""Finds items that an engine has forgotten while it serves others: no token for too long, and overtaken by a later item.

Waiting for a place is no fault: engines schedule in order of arrival and resume a preempted item first, so an item that
waits for memory is never overtaken. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping


class StuckItems:
    """Compares token counts between looks; leases are numbered in order of admission."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[int, tuple[int, float]] = {}
        self._firsts: list[tuple[int, float]] = []

    def look(self, counts: Mapping[int, int], now: float) -> list[int]:
        """Take the tokens of each lease in hand so far; returns the leases that are stuck."""
        seen, self._seen = self._seen, {}
        stuck = []
        for lease, count in sorted(counts.items()):
            before, since = seen.get(lease, (0, now))
            if count != before:
                since = now
                if not before:
                    self._note_first(lease, now)
            self._seen[lease] = (count, since)
            if now - since >= self._limit_s and self._was_overtaken(lease, count, since):
                stuck.append(lease)
        if not counts:
            self._firsts.clear()
        return stuck

    def _note_first(self, lease: int, now: float) -> None:
        """Keep the latest first token of any lease beyond a given one: numbers fall while times rise."""
        while self._firsts and self._firsts[-1][0] <= lease:
            self._firsts.pop()
        self._firsts.append((lease, now))

    def _was_overtaken(self, lease: int, count: int, since: float) -> bool:
        """Two first tokens that one look sees overtake nobody."""
        return any(later > lease and (at > since or not count) for later, at in self._firsts)

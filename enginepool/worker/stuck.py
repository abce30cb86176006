"""Finds the item that an engine has put aside for good: no token for too long, and overtaken by a later item or told to be blocked.

Waiting for a place is no fault: engines schedule in order of arrival and resume a preempted item first, so an item that
waits for memory is never overtaken. Blocked items wait for something of their own, such as the compilation of a schema, which
runs in order of arrival too: the earliest is at fault. Time in which nobody looked counts little, for the process may have
been stopped. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

LONGEST_GAP_S = 2.0


class StuckItems:
    """Compares token counts between looks; leases are numbered in order of admission."""

    def __init__(self, limit_s: float, longest_gap_s: float = LONGEST_GAP_S) -> None:
        self._limit_s = limit_s
        self._longest_gap_s = longest_gap_s
        self._last: float | None = None
        self._now = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        self._firsts: list[tuple[int, float]] = []

    def look(self, counts: Mapping[int, int], blocked: Collection[int], now: float) -> int | None:
        """Take the tokens of each lease in hand so far, and those that are blocked; returns the earliest stuck lease."""
        self._now += 0.0 if self._last is None else min(now - self._last, self._longest_gap_s)
        self._last, now = now, self._now
        seen, self._seen = self._seen, {}
        stuck = None
        for lease, count in sorted(counts.items()):
            before, since = seen.get(lease, (0, now))
            if count != before:
                since = now
                if not before:
                    self._note_first(lease, now)
            self._seen[lease] = (count, since)
            is_late = stuck is None and now - since >= self._limit_s
            if is_late and (lease in blocked or self._was_overtaken(lease, count, since)):
                stuck = lease
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

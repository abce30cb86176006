"""How long items took over the last minute: exact counts, and percentiles from a bounded number of samples a second.

It is called once an item, so it must cost next to nothing at any rate. Each second keeps at most MAX_SAMPLES: when it is
full, every third sample stays and from then on only every third of the former ones is taken (three, because slices
are powers of two and a step that divides them would always meet the same place in a slice). A busy second weighs more
than an idle one: each sample in a percentile stands for equally many items. Pure: time is an argument.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from enginepool.status import LatencySummary, Percentiles

WINDOW_S = 60
RATE_SPAN_S = 5
MAX_SAMPLES = 256
THINNING = 3


class _Second:
    """What ended within one second. The three arrays have one entry a sample; NaN where there was no first token."""

    __slots__ = ("ended", "failed", "number", "step", "total", "ttft", "waiting")

    def __init__(self) -> None:
        self.waiting, self.ttft, self.total = array("d"), array("d"), array("d")
        self.restart(-1)

    def restart(self, number: int) -> None:
        self.number = number
        self.ended = self.failed = 0
        self.step = 1
        for samples in (self.waiting, self.ttft, self.total):
            del samples[:]

    def thin_out(self) -> None:
        self.waiting, self.ttft, self.total = self.waiting[::THINNING], self.ttft[::THINNING], self.total[::THINNING]
        self.step *= THINNING


class LatencyWindow:
    """The last 60 seconds of a pool. `now` never goes back (monotonic seconds)."""

    def __init__(self) -> None:
        self._ring = [_Second() for _ in range(WINDOW_S)]
        self._current = self._ring[0]
        self._until = -1.0
        self._skip = 0

    def ended(self, now: float, is_ok: bool, is_failed: bool = True) -> bool:
        """Count one item; True when its latencies are wanted, by `sample`. One that is not ok may be aborted rather than failed."""
        if now >= self._until:
            self._turn(now)
        second = self._current
        second.ended += 1
        if not is_ok:
            second.failed += is_failed
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._skip = second.step - 1
        return True

    def sample(self, waiting_s: float, ttft_s: float | None, total_s: float) -> None:
        """Keep one item's seconds: received → leased, received → first token (None: unknown), received → end."""
        second = self._current
        second.waiting.append(waiting_s)
        second.ttft.append(float("nan") if ttft_s is None else ttft_s)
        second.total.append(total_s)
        if len(second.total) >= MAX_SAMPLES:
            second.thin_out()
            self._skip = second.step - 1

    def summary(self, now: float) -> LatencySummary | None:
        """What the last minute was like; None when nothing ended in it."""
        newest = int(now)
        seconds = [second for second in self._ring if newest - WINDOW_S < second.number <= newest and second.ended]
        if not seconds:
            return None
        recent = sum(second.ended for second in seconds if newest - RATE_SPAN_S <= second.number < newest)
        picks = _pick_evenly(seconds)
        return LatencySummary(
            ended=sum(second.ended for second in seconds),
            failed=sum(second.failed for second in seconds),
            items_per_s=recent / RATE_SPAN_S,
            waiting_s=_percentiles(second.waiting[pick] for second, pick in picks),
            ttft_s=_percentiles(second.ttft[pick] for second, pick in picks),
            total_s=_percentiles(second.total[pick] for second, pick in picks),
        )

    def _turn(self, now: float) -> None:
        number = int(now)
        self._current = self._ring[number % WINDOW_S]
        self._current.restart(number)
        self._until = number + 1.0
        self._skip = 0


def _pick_evenly(seconds: list[_Second]) -> list[tuple[_Second, slice]]:
    """Which samples of each second to take so that every one stands for as many items as the coarsest second's do."""
    coarsest = max(second.step for second in seconds)
    picks: list[tuple[_Second, slice]] = []
    carry = 0
    for second in sorted(seconds, key=lambda second: second.number):
        first = -(-(coarsest - carry) // second.step) - 1
        pick = slice(first, None, coarsest // second.step)
        picks.append((second, pick))
        num_picked = len(range(*pick.indices(len(second.total))))
        carry += len(second.total) * second.step - num_picked * coarsest
    return picks


def _percentiles(parts: Iterable[array[float]]) -> Percentiles | None:
    """Nearest rank."""
    values = sorted(value for part in parts for value in part if value == value)
    if not values:
        return None
    return Percentiles(*(values[max(0, math.ceil(share * len(values)) - 1)] for share in (0.50, 0.90, 0.99)))

"""How values in seconds are spread: counts in buckets of equal ratio, so that any number of values takes the same memory."""

from __future__ import annotations

import math
from array import array

import msgspec

PER_DECADE = 40  # a bucket's ends are 6 % apart
LOWEST_EXPONENT, HIGHEST_EXPONENT = -6, 6
LOWEST_S = 10.0**LOWEST_EXPONENT
NUM_BUCKETS = PER_DECADE * (HIGHEST_EXPONENT - LOWEST_EXPONENT)


class HistogramBar(msgspec.Struct, frozen=True):
    """How many values lie from `low_s` up to `high_s`."""

    low_s: float
    high_s: float
    count: int


class LogHistogram:
    """Counts of values from a microsecond to a million seconds; beyond, they count as the nearest that fits."""

    def __init__(self) -> None:
        self.count = 0
        self.min_s = math.inf
        self.max_s = 0.0
        self._counts = array("Q", bytes(8 * NUM_BUCKETS))

    def add(self, seconds: float | None) -> None:
        """Count one value; None is not counted, and less than nothing (clocks of two machines) as nothing."""
        if seconds is None:
            return
        if seconds < 0:
            seconds = 0.0
        self.count += 1
        if seconds < self.min_s:
            self.min_s = seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self._counts[_bucket(seconds)] += 1

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all do not exceed, within 6 %; None where there is none."""
        rank = max(1, math.ceil(share * self.count))
        before = 0
        for bucket, count in enumerate(self._counts):
            if count and before + count >= rank:
                inside = bucket + (rank - before - 0.5) / count
                return min(self.max_s, max(self.min_s, _edge(inside)))
            before += count
        return None

    def bars(self, max_bars: int = 48) -> list[HistogramBar]:
        """The counts from the lowest to the highest value, in at most `max_bars` buckets of equal ratio."""
        if not self.count:
            return []
        first, last = _bucket(self.min_s), _bucket(self.max_s)
        step = 4 if self.count < 2000 else 2 if self.count < 20_000 else 1  # few values in narrow bars would look like a comb
        while last // step - first // step >= max_bars:
            step *= 2
        starts = range(first // step * step, last + 1, step)
        return [HistogramBar(_edge(start), _edge(start + step), sum(self._counts[start : start + step])) for start in starts]


def _bucket(seconds: float) -> int:
    if seconds <= LOWEST_S:
        return 0
    bucket = int((math.log10(seconds) - LOWEST_EXPONENT) * PER_DECADE)
    return bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1


def _edge(bucket: float) -> float:
    return math.exp((bucket / PER_DECADE + LOWEST_EXPONENT) * math.log(10))

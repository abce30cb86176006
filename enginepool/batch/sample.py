"""A bounded sample of a run's requests for its timeline: the whole run evenly thinned, and its end in full."""

from __future__ import annotations

from collections import deque

import msgspec

MAX_BARS = 4000
MAX_FAILED = 500
MAX_LATEST = 800
MAX_ID_CHARS = 80
_GOLDEN, _BITS = 0x9E3779B1, 32  # 2³² over the golden ratio


class RequestBar(msgspec.Struct, frozen=True):
    """One request on its worker, in Unix seconds; None where a milestone was not reached."""

    worker: int
    start: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    end: float
    line: int
    custom_id: str | None
    tokens: int
    attempts: int
    code: str | None


class EvenSample:
    """Keeps one bar in `stride`; the stride doubles whenever there are too many.

    Which ones is decided by the top bits of their number times the golden ratio: just as even as every second, every fourth …,
    but never in step with workers that take turns or batches of a power of two.
    """

    def __init__(self, max_bars: int) -> None:
        self.stride = 1
        self.seen = 0
        self.kept: list[tuple[int, RequestBar]] = []
        self._max_bars = max_bars

    def add(self, bar: RequestBar) -> None:
        """Count a bar, and keep it if it is its turn."""
        self.seen += 1
        if not _is_kept(self.seen, self.stride):
            return
        self.kept.append((self.seen, bar))
        if len(self.kept) > self._max_bars:
            self.stride *= 2
            self.kept = [(number, bar) for number, bar in self.kept if _is_kept(number, self.stride)]


class RequestSample:
    """Bars of the whole run, failed ones thinned apart from the others, and all bars of its last stretch."""

    def __init__(self, max_bars: int = MAX_BARS, max_failed: int = MAX_FAILED, max_latest: int = MAX_LATEST) -> None:
        self.ok = EvenSample(max_bars - max_failed)
        self.failed = EvenSample(max_failed)
        self.latest: deque[RequestBar] = deque(maxlen=max_latest)

    @property
    def seen(self) -> int:
        """All requests."""
        return self.ok.seen + self.failed.seen

    @property
    def is_thinned(self) -> bool:
        """Whether some are not in it."""
        return self.ok.stride > 1 or self.failed.stride > 1

    def add(self, bar: RequestBar) -> None:
        """Count a request that has ended."""
        (self.ok if bar.code is None else self.failed).add(bar)
        self.latest.append(bar)

    def bars(self) -> list[RequestBar]:
        """What was kept, in the order of the ends."""
        return sorted((bar for _, bar in self.ok.kept + self.failed.kept), key=lambda bar: bar.end)


def _is_kept(number: int, stride: int) -> bool:
    return ((number * _GOLDEN) & ((1 << _BITS) - 1)) * stride < 1 << _BITS

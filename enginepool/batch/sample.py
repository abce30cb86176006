"""A bounded sample of a run's requests for its timeline: evenly thinned, with the failed ones kept as long as there is room."""

from __future__ import annotations

import msgspec

MAX_BARS = 4000
MAX_FAILED = 500
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


class RequestSample:
    """Keeps one request in `stride`; the stride doubles whenever there are too many.

    Which ones is decided by the top bits of their number times the golden ratio: just as even as every second, every fourth …,
    but never in step with workers that take turns or batches of a power of two.
    """

    def __init__(self, max_bars: int = MAX_BARS, max_failed: int = MAX_FAILED) -> None:
        self.stride = 1
        self.seen = 0
        self.failed_left_out = 0
        self._max_bars = max_bars
        self._max_failed = max_failed
        self._ok: list[tuple[int, RequestBar]] = []
        self._failed: list[tuple[int, RequestBar]] = []

    def takes(self, is_failed: bool) -> bool:
        """Count one request; True when its bar is wanted, by `keep`."""
        self.seen += 1
        if is_failed:
            self.failed_left_out += len(self._failed) >= self._max_failed
            return len(self._failed) < self._max_failed
        return _is_kept(self.seen, self.stride)

    def keep(self, bar: RequestBar) -> None:
        """Take the bar of the request counted last."""
        if bar.code is not None:
            self._failed.append((self.seen, bar))
            return
        self._ok.append((self.seen, bar))
        if len(self._ok) > self._max_bars - self._max_failed:
            self.stride *= 2
            self._ok = [(number, bar) for number, bar in self._ok if _is_kept(number, self.stride)]

    def bars(self) -> list[RequestBar]:
        """What was kept, in the order in which it came."""
        return [bar for _, bar in sorted(self._ok + self._failed, key=lambda entry: entry[0])]


def _is_kept(number: int, stride: int) -> bool:
    return ((number * _GOLDEN) & ((1 << _BITS) - 1)) * stride < 1 << _BITS

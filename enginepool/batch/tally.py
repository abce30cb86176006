"""What one worker did in a run: lines, tokens, and the time in which it had something to do."""

from __future__ import annotations

from enginepool.batch.buckets import TimeBuckets

MAX_OPEN_SPANS = 64


class WorkerTally:
    """Counts of one worker. `running` sums request-seconds over time: divided by a span's length, how many ran at once."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ok = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.running = TimeBuckets()
        self._closed_s = 0.0
        self._spans: list[tuple[float, float]] = []

    @property
    def done(self) -> int:
        """Lines that ended here."""
        return self.ok + self.failed

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was running."""
        return self._closed_s + sum(end - start for start, end in self._spans)

    def ran(self, start: float, end: float) -> None:
        """A request ran here, in seconds since the run's start; they come about in the order of their ends."""
        start = max(0.0, start)
        if end <= start:
            return
        self.running.spread(start, end, end - start)
        spans = self._spans
        while spans and spans[-1][1] >= start:
            before = spans.pop()
            start, end = min(start, before[0]), max(end, before[1])
        spans.append((start, end))
        if len(spans) > MAX_OPEN_SPANS:  # a request that runs across so many idle gaps would fill the oldest in vain
            oldest = spans.pop(0)
            self._closed_s += oldest[1] - oldest[0]

"""The statistics of a batch run, in memory that does not grow with its lines."""

from __future__ import annotations

from collections import Counter

import msgspec

from enginepool.batch.buckets import TimeBuckets
from enginepool.batch.histogram import LogHistogram
from enginepool.batch.sample import MAX_ID_CHARS, RequestBar, RequestSample
from enginepool.batch.tally import WorkerTally
from enginepool.clock import Timings

MAX_FAILURES = 200
MAX_CODES = 50
MAX_MESSAGE_CHARS = 1000
OTHER_CODES = "other"
UNKNOWN_CODE = "failed"


class LineRecord(msgspec.Struct, frozen=True):
    """How one line of the input ended. `line` is its number in the file, from 1; `worker` is None where none had it."""

    line: int
    custom_id: str | None
    ok: bool
    code: str | None
    message: str | None
    worker: int | None
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    timings: Timings


class Failure(msgspec.Struct, frozen=True):
    """One failed line, its texts cut to a bearable length."""

    line: int
    custom_id: str | None
    code: str
    message: str


class Latencies:
    """The histograms of lines that are ok, in seconds as `Timings` tells them."""

    def __init__(self) -> None:
        self.ttft = LogHistogram()
        self.e2e = LogHistogram()
        self.queue = LogHistogram()
        self.tpot = LogHistogram()

    def add(self, timings: Timings) -> None:
        """Count one line."""
        self.ttft.add(timings.ttft_s)
        self.e2e.add(timings.e2e_s)
        self.queue.add(timings.queue_s)
        self.tpot.add(timings.tpot_s)


class RunLedger:
    """What has happened to the lines of a run; `started_wall` is its start in Unix seconds."""

    def __init__(self, num_lines: int, started_wall: float) -> None:
        self.num_lines = num_lines
        self.started_wall = started_wall
        self.skipped = self.failed_earlier = self.ok = self.failed = self.retried = self.untimed = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.codes: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.workers: dict[int, WorkerTally] = {}
        self.latencies = Latencies()
        self.sample = RequestSample()
        self.tokens_over_time = TimeBuckets()
        self.ok_over_time = TimeBuckets()
        self.failed_over_time = TimeBuckets()
        self._last_end = started_wall
        self._is_over = False

    @property
    def done(self) -> int:
        """Lines that are done, those of earlier runs included."""
        return self.skipped + self.ok + self.failed

    @property
    def all_ok(self) -> int:
        """Lines that are ok, those of earlier runs included."""
        return self.skipped - self.failed_earlier + self.ok

    @property
    def all_failed(self) -> int:
        """Lines that failed, those of earlier runs included."""
        return self.failed_earlier + self.failed

    @property
    def ended_here(self) -> int:
        """Lines that ended in this run."""
        return self.ok + self.failed

    @property
    def wall_s(self) -> float:
        """Seconds from the start to `finish`, until then to the last line that ended."""
        return max(0.0, self._last_end - self.started_wall)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time."""
        return self.completion_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def lines_per_s(self) -> float:
        """Lines of this run over the whole time."""
        return self.ended_here / self.wall_s if self.wall_s else 0.0

    def skip(self, count: int, failed: int = 0) -> None:
        """Some lines were done by an earlier run, `failed` of them with an error."""
        self.skipped += count
        self.failed_earlier += failed

    def finish(self, ended_wall: float) -> None:
        """The run is over, in Unix seconds."""
        self._last_end = ended_wall
        self._is_over = True

    def add(self, record: LineRecord) -> None:
        """Count a line that has ended."""
        self.retried += record.attempts > 1
        self.prompt_tokens += record.prompt_tokens
        self.completion_tokens += record.completion_tokens
        if record.ok:
            self.ok += 1
            self.latencies.add(record.timings)
        else:
            self._fail(record)
        end = record.timings.delivered or record.timings.finished
        if end is None:
            self.untimed += 1
        else:
            self._count_over_time(record, end)
        if record.worker is not None:
            self._count_worker(record, record.worker, end)

    def _fail(self, record: LineRecord) -> None:
        self.failed += 1
        code = record.code or UNKNOWN_CODE
        self.codes[code if code in self.codes or len(self.codes) < MAX_CODES else OTHER_CODES] += 1
        if len(self.failures) < MAX_FAILURES:
            message = _cut(record.message or "", MAX_MESSAGE_CHARS) or ""
            self.failures.append(Failure(record.line, _cut(record.custom_id, MAX_MESSAGE_CHARS), code, message))

    def _count_over_time(self, record: LineRecord, end: float) -> None:
        """Tokens are counted where they were made, as far as that is known: all at the end would draw a long answer as a spike."""
        if end > self._last_end and not self._is_over:
            self._last_end = end
        (self.ok_over_time if record.ok else self.failed_over_time).add(end - self.started_wall, 1)
        if record.completion_tokens:
            first = record.timings.first_token or end
            last = record.timings.last_token or end
            self.tokens_over_time.spread(first - self.started_wall, last - self.started_wall, record.completion_tokens)

    def _count_worker(self, record: LineRecord, index: int, end: float | None) -> None:
        tally = self.workers.get(index)
        if tally is None:
            tally = self.workers[index] = WorkerTally(index)
        tally.ok += record.ok
        tally.failed += not record.ok
        tally.prompt_tokens += record.prompt_tokens
        tally.completion_tokens += record.completion_tokens
        timings = record.timings
        start = timings.leased or timings.arrived or timings.scheduled
        if start is None or end is None:
            return
        worker_end = timings.finished or end
        tally.ran((timings.scheduled or start) - self.started_wall, worker_end - self.started_wall)
        self.sample.add(_bar(record, index, start, worker_end))


def _bar(record: LineRecord, worker: int, start: float, end: float) -> RequestBar:
    timings = record.timings
    return RequestBar(
        worker,
        start,
        timings.scheduled,
        timings.first_token,
        timings.last_token,
        max(start, end),
        record.line,
        _cut(record.custom_id, MAX_ID_CHARS),
        record.completion_tokens,
        record.attempts,
        None if record.ok else record.code or UNKNOWN_CODE,
    )


def _cut(text: str | None, limit: int) -> str | None:
    return text if text is None or len(text) <= limit else text[: limit - 1] + "…"

"""The statistics of a batch run: exact where they are counts, close where they are percentiles, and no larger after more lines."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from itertools import pairwise

import pytest
from batch_run import STARTED, make_ledger, make_record, make_run

from enginepool.batch.buckets import MAX_BUCKETS, TimeBuckets
from enginepool.batch.histogram import LogHistogram
from enginepool.batch.lanes import Lanes
from enginepool.batch.ledger import MAX_CODES, MAX_FAILURES, MAX_MESSAGE_CHARS, OTHER_CODES, RunLedger
from enginepool.batch.sample import RequestBar, RequestSample
from enginepool.batch.summary import exact_span, span, summary_lines
from enginepool.batch.tally import MAX_OPEN_SPANS, WorkerTally
from enginepool.clock import Timings

# The ledger.


def test_ledger_counts_lines_tokens_and_workers() -> None:
    ledger = RunLedger(6, STARTED)
    ledger.skip(2)
    for record in (
        make_record(3, end=2.0, worker=0, tokens=10),
        make_record(4, end=3.0, worker=1, tokens=30, attempts=2),
        make_record(5, end=4.0, code="worker_lost", worker=1),
    ):
        ledger.add(record)
    assert (ledger.done, ledger.ok, ledger.failed, ledger.ended_here, ledger.retried) == (5, 2, 1, 3, 1)
    assert (ledger.completion_tokens, ledger.prompt_tokens, ledger.wall_s) == (40, 60, 4.0)
    assert (ledger.tokens_per_s, ledger.lines_per_s) == (10.0, 0.75)
    assert {index: (tally.ok, tally.failed, tally.completion_tokens) for index, tally in ledger.workers.items()} == {
        0: (1, 0, 10),
        1: (1, 1, 30),
    }


def test_ledger_without_lines_has_no_rates() -> None:
    ledger = RunLedger(0, STARTED)
    assert (ledger.wall_s, ledger.tokens_per_s, ledger.lines_per_s) == (0.0, 0.0, 0.0)


def test_ledger_wall_time_ends_with_the_run() -> None:
    ledger = RunLedger(1, STARTED)
    ledger.add(make_record(end=3.0))
    ledger.finish(STARTED + 5.0)
    assert ledger.wall_s == 5.0


def test_ledger_clock_that_went_back_makes_no_negative_time() -> None:
    ledger = RunLedger(1, STARTED)
    ledger.finish(STARTED - 5.0)
    assert ledger.wall_s == 0.0


def test_ledger_takes_lines_without_timings() -> None:
    ledger = RunLedger(2, STARTED)
    ledger.add(make_record(1, timings=Timings()))
    ledger.add(make_record(2, code="invalid_request", worker=None, timings=Timings()))
    assert (ledger.done, ledger.untimed, ledger.wall_s, ledger.latencies.e2e.count) == (2, 2, 0.0, 0)


def test_ledger_lists_the_first_failures_and_counts_all() -> None:
    ledger = RunLedger(500, STARTED)
    for line in range(1, 501):
        ledger.add(make_record(line, end=float(line), code="timeout"))
    assert [failure.line for failure in ledger.failures] == list(range(1, MAX_FAILURES + 1))
    assert ledger.codes == {"timeout": 500}


def test_ledger_cuts_long_texts_of_failures() -> None:
    ledger = RunLedger(1, STARTED)
    ledger.add(make_record(code="timeout", message="m" * 100_000, custom_id="i" * 100_000))
    failure = ledger.failures[0]
    assert (len(failure.message), len(failure.custom_id or "")) == (MAX_MESSAGE_CHARS, MAX_MESSAGE_CHARS)


def test_ledger_counts_codes_beyond_the_first_together() -> None:
    ledger = RunLedger(100, STARTED)
    for line in range(MAX_CODES + 7):
        ledger.add(make_record(line, code=f"code {line}"))
    assert (len(ledger.codes), ledger.codes[OTHER_CODES]) == (MAX_CODES + 1, 7)


def test_ledger_does_not_grow_with_its_lines() -> None:
    ledger = make_ledger(12_000, num_workers=8, slots=32, token_s=0.001, failing=0.1)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for record in make_run(20_000, num_workers=8, slots=32, seed=2, failing=0.1):
        ledger.add(record)
    del record
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2 << 20  # bytes: the sample is exchanged, not added to


# Percentiles.


@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 300.0])
def test_quantiles_are_within_six_percent(scale: float) -> None:
    chance = random.Random(7)
    values = sorted(chance.lognormvariate(math.log(scale), 1.0) for _ in range(5000))
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[math.ceil(share * len(values)) - 1], rel=0.06)
    assert sum(bar.count for bar in histogram.bars()) == len(values)


def test_quantile_of_equal_values_is_that_value() -> None:
    histogram = LogHistogram()
    for _ in range(10):
        histogram.add(0.37)
    assert [histogram.quantile(share) for share in (0.5, 0.99)] == [0.37, 0.37]


def test_histogram_takes_none_zero_negative_and_huge_values() -> None:
    histogram = LogHistogram()
    for value in (None, 0.0, -1.0, 1e12):
        histogram.add(value)
    assert (histogram.count, histogram.min_s, histogram.max_s) == (3, 0.0, 1e12)
    assert len(histogram.bars(40)) <= 40
    assert LogHistogram().quantile(0.5) is None
    assert LogHistogram().bars() == []


# Over time.


def test_buckets_keep_the_sum_while_they_widen() -> None:
    buckets = TimeBuckets()
    for second in range(10_000):
        buckets.add(float(second), 1.0)
        buckets.spread(float(second), second + 17.3, 5.0)
    assert sum(buckets.sums(buckets.width_s, MAX_BUCKETS)) == pytest.approx(60_000)
    assert buckets.width_s == pytest.approx(25.6)


def test_buckets_spread_an_amount_evenly() -> None:
    buckets = TimeBuckets()
    buckets.spread(0.25, 1.05, 8.0)
    assert buckets.sums(0.1, 12) == pytest.approx([0, 0, 0.5, 1, 1, 1, 1, 1, 1, 1, 0.5, 0], abs=1e-6)


@pytest.mark.parametrize(("start", "end"), [(0.5, 0.5), (0.5, 0.4), (-3.0, -2.0), (0.51, 0.52)])
def test_buckets_count_a_span_of_no_length_at_its_start(start: float, end: float) -> None:
    buckets = TimeBuckets()
    buckets.spread(start, end, 3.0)
    assert sorted(buckets.sums(0.1, 10))[-2:] == [0.0, 3.0]


def test_busy_time_counts_overlaps_once() -> None:
    tally = WorkerTally(0)
    for start, end in ((0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 6.5), (0.5, 7.0), (9.0, 8.0)):
        tally.ran(start, end)
    assert tally.busy_s == 7.0


def test_busy_time_of_many_gaps_is_kept_in_few_spans() -> None:
    tally = WorkerTally(0)
    for second in range(1000):
        tally.ran(float(second), second + 0.5)
    assert tally.busy_s == 500.0
    assert len(tally._spans) <= MAX_OPEN_SPANS


# The sample.


def make_bar(line: int, worker: int = 0, code: str | None = None) -> RequestBar:
    return RequestBar(worker, 0.0, None, None, None, 1.0, line, None, 1, 1, code)


def test_sample_stays_bounded_and_even() -> None:
    sample = RequestSample(max_bars=400, max_failed=50)
    for line in range(100_000):
        sample.add(make_bar(line, worker=line % 8))
    bars = sample.bars()
    assert 170 <= len(bars) <= 350
    assert sample.ok.stride == 512
    tenths = [sum(low <= bar.line < low + 10_000 for bar in bars) for low in range(0, 100_000, 10_000)]
    assert max(tenths) - min(tenths) <= 3
    of_worker = [sum(bar.worker == worker for bar in bars) for worker in range(8)]
    assert min(of_worker) > 10  # workers that take turns are not in step with the thinning


def test_sample_thins_failed_requests_apart_from_the_others() -> None:
    sample = RequestSample(max_bars=100, max_failed=20)
    for line in range(10_000):
        sample.add(make_bar(line, code=None if line % 300 else "timeout"))
    failed = [bar.line for bar in sample.bars() if bar.code]
    assert (sample.failed.seen, sample.failed.stride, sample.ok.stride) == (34, 2, 128)
    assert 15 <= len(failed) <= 19
    assert failed[-1] > 9000


def test_sample_has_the_last_requests_in_full() -> None:
    sample = RequestSample(max_bars=100, max_failed=20, max_latest=30)
    for line in range(1000):
        sample.add(make_bar(line))
    assert [bar.line for bar in sample.latest] == list(range(970, 1000))


def test_lanes_of_spans_in_order_of_ends_are_as_few_as_run_at_once() -> None:
    chance = random.Random(3)
    free = [0.0] * 16
    spans = []
    for _ in range(2000):
        slot = min(range(16), key=free.__getitem__)
        start = free[slot] + chance.random() * 0.01
        free[slot] = start + chance.expovariate(1.0)
        spans.append((start, free[slot]))
    lanes = Lanes()
    ends: dict[int, float] = {}
    for start, end in sorted(spans, key=lambda span: span[1]):
        lane, is_new = lanes.place(start, end)
        assert is_new == (lane not in ends)
        assert ends.get(lane, 0.0) <= start
        ends[lane] = end
    assert len(lanes) <= 16


def test_lanes_of_spans_in_any_order_do_not_overlap() -> None:
    chance = random.Random(4)
    lanes = Lanes()
    placed: dict[int, list[tuple[float, float]]] = {}
    for _ in range(500):
        start = chance.random() * 100
        end = start + chance.random()
        placed.setdefault(lanes.place(start, end)[0], []).append((start, end))
    for spans in placed.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


# The summary.


def test_summary_tells_what_became_of_all_lines() -> None:
    ledger = RunLedger(200, STARTED)
    ledger.skip(50)
    for line in range(147):
        ledger.add(make_record(line, end=31.2 * (line + 1) / 147, tokens=84))
    for line, code in enumerate(("invalid_request", "worker_lost", "invalid_request")):
        ledger.add(make_record(line, end=20.0, code=code))
    assert summary_lines(ledger) == [
        "200 lines: 197 ok, 3 failed (2 invalid_request, 1 worker_lost), 50 of them from an earlier run; "
        "12,348 tokens in 31.2 s, 396 tokens/s; time to first token p50 500 ms, p99 500 ms"
    ]


def test_summary_counts_lines_that_failed_in_an_earlier_run_as_failed() -> None:
    ledger = RunLedger(10, STARTED)
    ledger.skip(6, failed=2)
    ledger.add(make_record(7, end=1.0, code="timeout"))
    assert (ledger.all_ok, ledger.all_failed, ledger.done) == (4, 3, 7)
    assert summary_lines(ledger)[0].startswith(
        "10 lines: 4 ok, 3 failed (1 timeout, 2 in an earlier run), 6 of them from an earlier run, 3 not done"
    )


def test_summary_of_a_run_that_was_stopped() -> None:
    ledger = RunLedger(10, STARTED)
    ledger.add(make_record(end=2.0, tokens=1, attempts=3))
    assert summary_lines(ledger) == [
        "10 lines: 1 ok, 9 not done; 1 token in 2.0 s, 0.5 tokens/s; time to first token p50 500 ms, p99 500 ms; "
        "1 line took more than one attempt"
    ]


def test_summary_of_nothing() -> None:
    assert summary_lines(RunLedger(0, STARTED)) == ["0 lines: 0 ok"]


def test_summary_of_a_finished_run_that_is_run_again() -> None:
    ledger = RunLedger(5, STARTED)
    ledger.skip(5)
    assert summary_lines(ledger) == ["5 lines: 5 ok, 5 of them from an earlier run"]


def test_summary_of_embeddings_counts_prompt_tokens() -> None:
    ledger = RunLedger(1, STARTED)
    ledger.add(make_record(end=2.0, tokens=0, timings=Timings(submitted=STARTED, delivered=STARTED + 2.0)))
    assert summary_lines(ledger) == ["1 line: 1 ok; 20 prompt tokens in 2.0 s, 10 tokens/s; time to answer p50 2.00 s, p99 2.00 s"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"), (3600, "1 h"), (18_120, "5 h 2 min"), (183_600, "2 d 3 h")],
)
def test_span_in_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_exact_span_has_a_digit_more_below_two_minutes() -> None:
    assert [exact_span(seconds) for seconds in (0.04, 31.23, 119.96)] == ["0.0 s", "31.2 s", "2 min"]

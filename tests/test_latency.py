"""The latency window: exact counts, percentiles within bounds at any rate, nothing older than a minute, bounded memory."""

from __future__ import annotations

import pytest

from enginepool.dispatcher.latency import MAX_SAMPLES, WINDOW_S, LatencyWindow
from enginepool.status import LatencySummary, Percentiles


def end(window: LatencyWindow, now: float, total_s: float, *, ttft_s: float | None = None) -> None:
    if window.ended(now, True):
        window.sample(total_s / 10, ttft_s, total_s)


def summary_of(window: LatencyWindow, now: float) -> LatencySummary:
    summary = window.summary(now)
    assert summary is not None
    return summary


def test_empty_window_has_no_summary() -> None:
    assert LatencyWindow().summary(1000.0) is None


def test_few_items_give_exact_percentiles() -> None:
    window = LatencyWindow()
    for number in range(1, 101):
        end(window, 100.0 + number / 200, float(number), ttft_s=number / 2)
    summary = summary_of(window, 101.0)
    assert summary.ended == 100
    assert summary.total_s == Percentiles(50.0, 90.0, 99.0)
    assert summary.ttft_s == Percentiles(25.0, 45.0, 49.5)
    assert summary.waiting_s == Percentiles(5.0, 9.0, 9.9)


def test_one_item_is_every_percentile() -> None:
    window = LatencyWindow()
    end(window, 100.0, 2.0)
    assert summary_of(window, 100.5).total_s == Percentiles(2.0, 2.0, 2.0)


def test_first_token_is_unknown_where_no_engine_told_one() -> None:
    window = LatencyWindow()
    end(window, 100.0, 2.0)
    assert summary_of(window, 100.5).ttft_s is None


def test_failed_items_are_counted_and_have_no_latency() -> None:
    window = LatencyWindow()
    assert not window.ended(100.0, False)
    summary = summary_of(window, 100.5)
    assert (summary.ended, summary.failed, summary.total_s) == (1, 1, None)


def test_items_leave_the_window_after_a_minute() -> None:
    window = LatencyWindow()
    end(window, 100.0, 2.0)
    end(window, 130.0, 4.0)
    assert summary_of(window, 100.0 + WINDOW_S - 1).ended == 2
    assert summary_of(window, 100.0 + WINDOW_S).ended == 1
    assert window.summary(130.0 + WINDOW_S) is None


def test_rate_is_of_the_last_full_seconds() -> None:
    window = LatencyWindow()
    for step in range(1000):
        end(window, 100.0 + step / 100, 1.0)
    assert summary_of(window, 110.0).items_per_s == pytest.approx(100)
    assert summary_of(window, 120.0).items_per_s == 0


def test_busy_second_keeps_a_bounded_number_of_samples_spread_over_it() -> None:
    window = LatencyWindow()
    for number in range(100_000):
        end(window, 100.0 + number / 100_000, float(number))
    summary = summary_of(window, 101.0)
    second = window._current
    assert summary.ended == 100_000
    assert MAX_SAMPLES / 3 <= len(second.total) == len(second.ttft) == len(second.waiting) <= MAX_SAMPLES
    assert summary.total_s is not None
    assert summary.total_s.p50 == pytest.approx(50_000, rel=0.02)
    assert summary.total_s.p99 == pytest.approx(99_000, rel=0.02)


def test_busy_second_weighs_more_than_an_idle_one() -> None:
    window = LatencyWindow()
    for number in range(10_000):
        end(window, 100.0 + number / 10_000, 1.0)
    for number in range(200):
        end(window, 101.0 + number / 200, 9.0)
    summary = summary_of(window, 102.0)
    assert summary.total_s == Percentiles(1.0, 1.0, 9.0)  # 2 % of the items were slow


def test_all_samples_of_equally_quiet_seconds_are_used() -> None:
    window = LatencyWindow()
    for number in range(200):
        end(window, 100.0 + number / 10, float(number % 100))
    assert summary_of(window, 120.0).total_s == Percentiles(49.0, 89.0, 98.0)

"""Progress as lines, bars and calls: items, failures, rate, time left; silent unless it is asked for."""

from __future__ import annotations

import sys

import pytest
from conftest import wait_for

from enginepool import EnginePoolWarning, Pool, Progress, SamplingParams
from enginepool.client import progress
from enginepool.client.loading import describe_stages, make_loading_view
from enginepool.client.progress import describe_progress, make_view

FIVE = SamplingParams(max_tokens=5)
ENDLESS = SamplingParams(max_tokens=10_000_000)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        pytest.param(Progress(25, 100, 0, 5000, 10.0), "25/100 items, 500 tokens/s, 10 s, about 30 s left", id="under-way"),
        pytest.param(Progress(25, 100, 3, 5000, 10.0), "25/100 items, 3 failed, 500 tokens/s, 10 s, about 30 s left", id="with-failures"),
        pytest.param(Progress(0, 100, 0, 0, 10.0), "0/100 items, 0 tokens/s, 10 s", id="nothing-yet"),
        pytest.param(Progress(100, 100, 0, 123_456, 10.0), "100/100 items, 12,346 tokens/s, 10 s", id="finished"),
        pytest.param(Progress(1, 2, 0, 50, 0.0), "1/2 items, 0 tokens/s, 0 s, about 0 s left", id="no-time-passed"),
        pytest.param(Progress(0, 0, 0, 0, 0.0), "0/0 items, 0 tokens/s, 0 s", id="no-items"),
        pytest.param(Progress(25, None, 1, 5000, 10.0), "25 items, 1 failed, 500 tokens/s, 10 s", id="total-unknown"),
    ],
)
def test_describe_progress(state: Progress, line: str) -> None:
    assert describe_progress(state) == line


@pytest.mark.parametrize(
    ("state", "rate", "left_s"),
    [
        pytest.param(Progress(1, 4, 0, 50, 2.0), 25.0, 6.0, id="under-way"),
        pytest.param(Progress(4, 4, 0, 50, 2.0), 25.0, 0.0, id="finished"),
        pytest.param(Progress(0, 4, 0, 0, 2.0), 0.0, None, id="nothing-yet"),
        pytest.param(Progress(3, None, 0, 50, 0.0), 0.0, None, id="total-unknown"),
    ],
)
def test_progress_rate_and_time_left(state: Progress, rate: float, left_s: float | None) -> None:
    assert (state.tokens_per_s, state.left_s) == (rate, left_s)


def test_view_not_asked_for_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with make_view(10, progress=False) as view:
        view.update(5, 0, 100)
    assert capfd.readouterr() == ("", "")


def test_view_without_a_terminal_ends_with_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with make_view(10, progress=True) as view:
        view.update(5, 0, 100)
        view.update(10, 1, 200)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("enginepool: 10/10 items, 1 failed, ")


def test_view_without_a_terminal_prints_at_most_a_line_an_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    with make_view(100, progress=True) as view:
        for second in range(12):
            now = float(second)
            view.update(second, 0, 0)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["5/100", "10/100", "11/100"]


@pytest.mark.parametrize(("total", "count"), [(10, "7/10"), (None, "7/?")])
def test_view_on_a_terminal_draws_items_failures_and_rate(
    total: int | None, count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with make_view(total, progress=True) as view:
        view.update(7, 2, 700)
    out, err = capsys.readouterr()
    assert out == ""
    assert count in err
    assert "2 failed" in err
    assert "tok/s" in err


def test_loading_view_prints_a_stage_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_loading_view(True, 2)
    view.stage(1, "importing vLLM")
    view.close()
    assert capsys.readouterr().err.startswith("enginepool: worker 1: importing vLLM (")


@pytest.mark.parametrize("asked", [None, False])
def test_loading_view_without_a_terminal_is_silent_unless_asked_for(asked: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    view = make_loading_view(asked, 2)
    view.stage(1, "importing vLLM")
    view.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ({}, ""),
        ({0: "importing vLLM"}, "worker 0: importing vLLM"),
        ({1: "ready", 0: "loading m"}, "worker 0: loading m · worker 1: ready"),
        ({2: "ready", 0: "ready", 1: "loading m"}, "workers 0, 2: ready · worker 1: loading m"),
    ],
)
def test_describe_stages_puts_workers_at_one_stage_together(stages: dict[int, str], line: str) -> None:
    assert describe_stages(stages) == line


# Callbacks.


def test_callback_is_called_at_most_once_an_interval_and_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    seen: list[Progress] = []
    with make_view(4, seen.append) as view:
        for done, second in enumerate((0.0, 0.05, 0.125, 0.2, 0.21)):
            now = second
            view.update(done, 0, 10 * done)
    assert seen == [Progress(0, 4, 0, 0, 0.0), Progress(2, 4, 0, 20, 0.125), Progress(4, 4, 0, 40, 0.21)]


def test_callback_that_has_seen_the_end_is_not_told_twice() -> None:
    seen: list[Progress] = []
    with make_view(1, seen.append) as view:
        view.update(1, 0, 10)
    assert [state.done for state in seen] == [1]


def test_callback_of_a_call_without_items_is_called_once() -> None:
    seen: list[Progress] = []
    with Pool(engine="echo", workers=1) as pool:
        pool.generate_many([], FIVE, progress=seen.append)
    assert [(state.done, state.total) for state in seen] == [(0, 0)]


def test_callback_sees_items_failures_and_tokens_of_a_call(echo_pool: Pool) -> None:
    seen: list[Progress] = []
    with pytest.warns(EnginePoolWarning, match="1 of 40 items failed"):
        echo_pool.generate_many([*["item"] * 39, ""], FIVE, progress=seen.append)
    assert [state.done for state in seen] == sorted(state.done for state in seen)
    assert (seen[-1].done, seen[-1].total, seen[-1].failed, seen[-1].tokens) == (40, 40, 1, 195)


def test_callback_sees_items_that_ended_at_the_timeout(echo_pool: Pool) -> None:
    seen: list[Progress] = []
    with pytest.warns(EnginePoolWarning, match="2 timeout"):
        echo_pool.generate_many(["a", "b"], ENDLESS, timeout_s=0.05, progress=seen.append)
    assert (seen[-1].done, seen[-1].failed) == (2, 2)


def test_callback_that_raises_ends_the_call_and_aborts_its_items(echo_pool: Pool) -> None:
    calls: list[Progress] = []

    def fail(state: Progress) -> None:
        calls.append(state)
        if len(calls) == 2:
            raise ZeroDivisionError("no more")

    with pytest.raises(ZeroDivisionError, match="no more"):
        echo_pool.generate_many(["endless"] * 20, ENDLESS, progress=fail)
    assert len(calls) == 2
    assert echo_pool.generate("next", FIVE).text == "nextn"
    wait_for(lambda: echo_pool.status().in_flight == 0, "the abort of the items")

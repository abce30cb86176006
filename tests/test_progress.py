"""Progress in one plain line: items, failures, rate, time left; silent unless it is asked for."""

from __future__ import annotations

import pytest

from enginepool.client import progress
from enginepool.client.progress import LoadingView, describe_progress, make_view


@pytest.mark.parametrize(
    ("done", "total", "failed", "tokens", "elapsed_s", "line"),
    [
        pytest.param(25, 100, 0, 5000, 10.0, "25/100 items, 500 tokens/s, 10 s, about 30 s left", id="under-way"),
        pytest.param(25, 100, 3, 5000, 10.0, "25/100 items, 3 failed, 500 tokens/s, 10 s, about 30 s left", id="with-failures"),
        pytest.param(0, 100, 0, 0, 10.0, "0/100 items, 0 tokens/s, 10 s", id="nothing-yet"),
        pytest.param(100, 100, 0, 123_456, 10.0, "100/100 items, 12,346 tokens/s, 10 s", id="finished"),
        pytest.param(1, 2, 0, 50, 0.0, "1/2 items, 0 tokens/s, 0 s, about 0 s left", id="no-time-passed"),
        pytest.param(0, 0, 0, 0, 0.0, "0/0 items, 0 tokens/s, 0 s", id="no-items"),
    ],
)
def test_describe_progress(done: int, total: int, failed: int, tokens: int, elapsed_s: float, line: str) -> None:
    assert describe_progress(done, total, failed, tokens, elapsed_s) == line


def test_view_not_asked_for_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with make_view(10, is_shown=False) as view:
        view.update(5, 0, 100)
    assert capfd.readouterr() == ("", "")


def test_view_without_a_terminal_ends_with_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with make_view(10, is_shown=True) as view:
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
    with make_view(100, is_shown=True) as view:
        for second in range(12):
            now = float(second)
            view.update(second, 0, 0)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["5/100", "10/100", "11/100"]


def test_loading_view_prints_a_stage_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = LoadingView(is_shown=True)
    view.stage(1, "importing vLLM")
    view.close()
    assert capsys.readouterr().err.startswith("enginepool: worker 1: importing vLLM (")

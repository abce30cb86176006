"""The demo's texts and tables, on made-up outputs."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console, RenderableType

from enginepool.demo.report import (
    PLAIN_WIDTH,
    latency_table,
    make_console,
    output_lines,
    percentile,
    single_line,
    summary,
    to_text,
    worker_table,
)
from enginepool.demo.show import run_demo, show


@dataclass(frozen=True)
class FakeTimings:
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True)
class FakeOutput:
    index: int = 0
    text: str | None = "fine"
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    worker: int | None = 0
    attempts: int = 1
    error: str | None = None
    timings: FakeTimings = FakeTimings()

    @property
    def ok(self) -> bool:
        return self.error is None


def three_outputs() -> list[FakeOutput]:
    return [
        FakeOutput(0, "one " * 60, [7] * 1200, [1] * 10, 0, 1, None, FakeTimings(0.010, 0.5, 1.0)),
        FakeOutput(1, "two [bold]\x1b[2J", [7] * 300, [1] * 20, 1, 2, None, FakeTimings(0.020, 0.6, 2.0)),
        FakeOutput(2, None, [], None, None, 1, "worker_lost: died", FakeTimings(0.030, None, None)),
    ]


class FakePool:
    """Stands in for the pool: notes the prompts and gives the outputs it was told to."""

    prompts: list[str]
    outputs: list[FakeOutput]
    model: str | None

    def __init__(self, model: str | None, **settings: Any) -> None:
        type(self).model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def generate_many(self, prompts: list[str], params: list[Any], progress: bool) -> list[FakeOutput]:
        assert len(prompts) == len(params)
        type(self).prompts = prompts
        return self.outputs


def run_on_fake_pool(monkeypatch: pytest.MonkeyPatch, outputs: list[FakeOutput], model: str | None) -> tuple[int, str]:
    """Run the demo on a `FakePool`; return its exit code and what it printed."""
    monkeypatch.setattr("enginepool.Pool", FakePool, raising=False)
    monkeypatch.setattr("enginepool.SamplingParams", dict, raising=False)
    monkeypatch.setattr("enginepool.demo.show.ensure_model", lambda report: report("fetching") or Path("/cache/model"))
    FakePool.outputs = outputs
    stream = io.StringIO()
    code = run_demo(2, model, Console(file=stream, width=PLAIN_WIDTH, color_system=None))
    return code, stream.getvalue()


def row(table: RenderableType, key: str, width: int = PLAIN_WIDTH) -> list[str]:
    """Return the cells of the line that starts with `key`."""
    return next(line.split() for line in to_text(table, width).splitlines() if line.split()[:1] == [key])


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 1.0), (25, 1.0), (50, 2.0), (51, 3.0), (95, 4.0), (100, 4.0)],
)
def test_percentile_takes_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([4.0, 2.0, 1.0, 3.0], percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_no_meaning(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="a percentile needs"):
        percentile(values, percent)


def test_single_line_folds_space_and_drops_control_codes() -> None:
    assert single_line("a\n\n b\t\x1b[31mc\ud800") == "a b [31mc"


def test_single_line_cuts_at_the_limit() -> None:
    assert single_line("word " * 30, limit=10) == "word word…"


def test_output_lines_show_text_and_error() -> None:
    lines = to_text(output_lines(three_outputs())).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["0", "0", "1200"], ["1", "1", "300"], ["2", "–", "0"]]
    assert lines[2].endswith("two [bold] [2J")
    assert lines[3].endswith("failed: worker_lost: died")


def test_worker_table_counts_per_worker() -> None:
    table = worker_table(three_outputs(), wall_s=3.0)
    assert row(table, "0") == ["0", "1", "10", "1,200", "400", "80%"]
    assert row(table, "1") == ["1", "1", "20", "300", "100", "20%"]
    assert row(table, "–") == ["–", "1", "–", "0", "0", "0%"]


def test_worker_table_without_time_or_tokens_shows_dashes() -> None:
    assert row(worker_table([FakeOutput()], wall_s=0.0), "0") == ["0", "1", "–", "0", "–", "–"]


def test_latency_table_counts_only_what_was_reached() -> None:
    table = latency_table(three_outputs())
    assert row(table, "queue_s") == ["queue_s", "0.020", "0.030", "3"]
    assert row(table, "ttft_s") == ["ttft_s", "0.500", "0.600", "2"]


def test_latency_table_without_stamps_shows_dashes() -> None:
    assert row(latency_table([FakeOutput()]), "e2e_s") == ["e2e_s", "–", "–", "0"]


def test_summary_names_failures_and_repeats() -> None:
    expected = "3 items, 1 failed, 1 with more than one attempt: 1,500 tokens in 3.0 s, 500 tokens/s"
    assert summary(three_outputs(), 3.0) == expected


@pytest.mark.parametrize("outputs", [[], three_outputs()], ids=["none", "three"])
@pytest.mark.parametrize("width", [40, 60, PLAIN_WIDTH])
def test_report_fits_the_width_without_control_codes(outputs: Sequence[FakeOutput], width: int) -> None:
    stream = io.StringIO()
    show(outputs, 3.0, Console(file=stream, width=width, color_system=None))
    lines = stream.getvalue().split("\n")
    assert max(len(line) for line in lines) <= width
    assert not [char for line in lines for char in line if unicodedata.category(char) == "Cc"]


def test_narrow_tables_keep_numbers_whole() -> None:
    assert row(worker_table(three_outputs(), 3.0), "0", width=40) == ["0", "1", "10", "1,200", "400", "80%"]


def test_narrow_output_lines_stay_one_line_each() -> None:
    lines = to_text(output_lines(three_outputs()), 40).splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("…")


def test_console_without_a_terminal_is_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    console = make_console()
    console.print(output_lines(three_outputs()))
    assert console.width == PLAIN_WIDTH
    assert "\x1b" not in capsys.readouterr().out


def test_demo_on_the_embedded_model_speaks_chatml(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run_on_fake_pool(monkeypatch, three_outputs()[:2], None)
    assert code == 0
    assert FakePool.model is None
    assert FakePool.prompts[0].startswith("<|im_start|>user\n")
    assert "fetching" in printed
    assert "enginepool serve --workers 2" in printed


def test_demo_on_a_model_of_ones_own_sends_plain_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, printed = run_on_fake_pool(monkeypatch, three_outputs(), "own/model")
    assert FakePool.model == "own/model"
    assert FakePool.prompts[0] == "What is the capital of France?"
    assert "fetching" not in printed


def test_demo_with_a_failed_item_returns_1(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run_on_fake_pool(monkeypatch, three_outputs(), None)
    assert code == 1
    assert "1 failed" in printed

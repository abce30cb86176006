"""The report of a batch run: one page that needs nothing else, keeps hostile text as text, and has something to say of any run."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batch_run import STARTED, make_ledger, make_record

from enginepool import Pool, SamplingParams
from enginepool.batch.charts import log_ticks, time_axis, value_ticks
from enginepool.batch.histogram import LogHistogram
from enginepool.batch.ledger import LineRecord, RunLedger
from enginepool.batch.report import render_report, visible, write_report
from enginepool.batch.throughput import histogram_chart, lines_chart, tokens_chart
from enginepool.batch.timeline import ROOM_PX, make_timelines
from enginepool.batch.trace import TraceWriter
from enginepool.clock import Timings

HOSTILE = [
    "</script><script>alert(1)</script>",
    '" onmouseover="alert(1)" \' <img src=x onerror=alert(2)>',
    "line one\nline two\r\n\x00\x1b[31mred",
    "\u202eevil \u05d0\u05d1\u05d2",
    "lone \ud800 surrogate",
    "{{ 7*7 }} {% raw %} ]]> <!--",
    "x" * 50_000,
]
VOID = {"meta", "path", "br"}


class Page(HTMLParser):
    """Tags, attributes and texts of a page; it must be well nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def planes_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="planes">(.*?)</script>', text, re.S)
    assert found is not None
    planes: dict[str, Any] = json.loads(found[1])
    return planes


def make_hostile() -> RunLedger:
    ledger = RunLedger(2 * len(HOSTILE), STARTED)
    for number, text in enumerate(HOSTILE, 1):
        ledger.add(make_record(number, end=float(number), code=text[:60], message=text, custom_id=text))
        ledger.add(make_record(100 + number, end=number + 0.5, custom_id=text))
    return ledger


# The page.


def test_report_tells_the_run() -> None:
    page = Page(render_report(make_ledger(300), {"model": "SmolLM2", "command": "enginepool run-batch -i in.jsonl"}))
    for text in (
        "300",
        "tokens/s",
        "wall time",
        "Worker 0",
        "Worker 1",
        "Time to first token",
        "invalid_request",
        "SmolLM2",
        "run-batch -i",
    ):
        assert text in page.text


def test_report_fetches_nothing() -> None:
    text = render_report(make_ledger(100), {})
    assert [name for name, _ in Page(text).attributes if name in ("src", "href", "srcset", "action", "xlink:href", "srcdoc")] == []
    assert re.findall(r"url\(|@import|https?://", text) == []
    assert "default-src 'none'" in text


def test_report_keeps_hostile_text_as_text() -> None:
    text = render_report(make_hostile(), {HOSTILE[0]: HOSTILE[1]})
    page = Page(text)
    assert (page.tags.count("script"), page.tags.count("img")) == (2, 0)
    assert [name for name, _ in page.attributes if name.startswith("on")] == []
    assert "</script><script>alert(1)</script>" in page.text
    assert "{{ 7*7 }} {% raw %} ]]> <!--" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    spots = [spot for plane in planes_of(text).values() for spot in plane["spots"]]
    assert any("</script>" in spot[3] for spot in spots)
    assert len(text) < 300_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("a\x00b\x1b[0m", "a\\x00b\\x1b[0m"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("שלום 日本 👩‍🔬", "שלום 日本 👩‍🔬"),
    ],
)
def test_visible_shows_what_would_be_obeyed(text: str, shown: str) -> None:
    assert visible(text) == shown


def make_untimed() -> RunLedger:
    ledger = RunLedger(3, STARTED)
    for line in range(3):
        ledger.add(make_record(line, timings=Timings()))
    ledger.finish(STARTED + 1)
    return ledger


def make_all_failed() -> RunLedger:
    ledger = RunLedger(3, STARTED)
    for line in range(3):
        ledger.add(make_record(line, end=float(line), code="invalid_request", worker=None))
    return ledger


def make_resumed() -> RunLedger:
    ledger = RunLedger(3, STARTED)
    ledger.skip(3)
    ledger.finish(STARTED + 0.1)
    return ledger


@pytest.mark.parametrize(
    ("ledger", "told"),
    [
        pytest.param(RunLedger(0, STARTED), ["No line ended in this run.", "No line of this run reached a worker."], id="no-lines"),
        pytest.param(make_resumed(), ["from an earlier run", "No line ended in this run."], id="all-done-before"),
        pytest.param(
            make_all_failed(), ["No tokens were generated", "3 invalid_request", "No line that is ok has this timing."], id="all-failed"
        ),
        pytest.param(
            make_untimed(),
            ["No line of this run has timings.", "3 of 3 lines have no timings", "No line failed in this run."],
            id="no-timings",
        ),
    ],
)
def test_report_of_a_run_with_nothing_to_draw(ledger: RunLedger, told: list[str]) -> None:
    text = Page(render_report(ledger, {})).text
    assert [part for part in told if part not in text] == []


def test_report_of_a_run_that_was_stopped_tells_what_is_not_done() -> None:
    ledger = make_ledger(50)
    ledger.num_lines = 80
    assert re.search(r"30\s*not done", Page(render_report(ledger, {})).text)


def test_report_of_many_lines_is_no_larger_than_its_sample() -> None:
    ledger = make_ledger(20_000, num_workers=8, slots=32)
    text = render_report(ledger, {})
    assert len(text) < 1_000_000
    assert "one in 8 of the" in text
    assert "The end of the run, every request" in text


@pytest.mark.usefixtures("fresh_run_dir")
def test_report_of_lines_that_a_pool_has_answered(tmp_path: Path) -> None:
    ledger = RunLedger(40, time.time())
    with Pool(engine="echo", workers=2, step_s=0.001) as pool, TraceWriter(str(tmp_path / "trace.json"), pytest.fail) as trace:
        for line, output in pool.iter_many((f"line {line}" for line in range(40)), SamplingParams(max_tokens=5)):
            record = LineRecord(line, None, output.ok, None, None, output.worker, output.attempts, 2, len(output.token_ids), output.timings)
            ledger.add(record)
            trace.add(record)
    ledger.finish(time.time())
    assert (ledger.latencies.tpot.count, ledger.untimed, ledger.sample.seen) == (40, 0, 40)
    assert 0 < ledger.workers[0].busy_s <= ledger.wall_s
    assert "Worker 1" in Page(render_report(ledger, {})).text
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["name"] == "decode" for event in events) == 40


# The file.


def test_report_replaces_the_old_one_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    old = path.open()
    write_report(path, make_ledger(10), {})
    assert old.read() == "old"
    old.close()
    assert path.read_text().startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["report.html"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_report_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    write_report(tmp_path / "link.html", RunLedger(0, STARTED), {})
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text().startswith("<!doctype html>")


def test_report_that_can_not_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_report(path, RunLedger(0, STARTED), {})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_report_into_a_device() -> None:
    write_report("/dev/null", RunLedger(0, STARTED), {})


def test_report_into_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "none" / "report.html", RunLedger(0, STARTED), {})


# Charts.


@pytest.mark.parametrize("span_s", [0.0, 0.05, 1.0, 22.0, 59.0, 300.0, 5000.0, 40_000.0, 1e6, 1e8])
def test_time_axis_has_few_ticks_in_a_unit_that_suits(span_s: float) -> None:
    axis = time_axis(span_s)
    assert 2 <= len(axis.ticks) <= 10
    assert all(0 <= tick.at <= 100.0001 and len(tick.label) <= 5 for tick in axis.ticks)


@pytest.mark.parametrize(
    ("highest", "labels"),
    [
        (0, ["0"]),
        (1, ["0", "0.5", "1"]),
        (970, ["0", "500", "1,000"]),
        (16_100, ["0", "5 k", "10 k", "15 k", "20 k"]),
        (0.03, ["0", "0.01", "0.02", "0.03"]),
        (3_100_000, ["0", "1 M", "2 M", "3 M", "4 M"]),
    ],
)
def test_value_ticks_are_round(highest: float, labels: list[str]) -> None:
    assert [tick.label for tick in value_ticks(highest)[0]] == labels


@pytest.mark.parametrize(("low_s", "high_s"), [(0.02, 0.06), (1e-6, 1e6), (0.4, 12.0), (1e-3, 1.0)])
def test_log_ticks_are_few_and_inside(low_s: float, high_s: float) -> None:
    ticks = log_ticks(low_s, high_s)
    assert 2 <= len(ticks) <= 14
    assert all(-0.1 <= tick.at <= 100.1 for tick in ticks)


def test_histogram_of_one_value_is_one_bar_among_empty_ones() -> None:
    histogram = LogHistogram()
    histogram.add(0.5)
    chart = histogram_chart("x", "X", histogram)
    assert chart.shapes[0].path.count("M") == 1
    assert chart.note == "p50 500 ms · p90 500 ms · p99 500 ms"
    assert [marker.is_bare for marker in chart.markers] == [False, True, True]


def test_throughput_charts_add_up_to_the_run() -> None:
    ledger = make_ledger(400)
    for chart, number in ((tokens_chart(ledger), ledger.completion_tokens), (lines_chart(ledger), ledger.ok)):
        rates = [(spot.x1 - spot.x0, float(re.findall(r"s: ([\d,.]+)", spot.text)[0].replace(",", ""))) for spot in chart.spots]
        assert sum(width / 1000 * ledger.wall_s * rate for width, rate in rates) == pytest.approx(number, rel=0.03)


def test_timeline_bars_of_one_lane_do_not_overlap() -> None:
    (timeline,) = make_timelines(make_ledger(600, num_workers=3))
    assert [band.num_lanes for band in timeline.bands] == [16, 16, 16]
    for band in timeline.bands:
        for lane in range(band.num_lanes):
            spots = sorted(spot for spot in band.spots if spot.lane == lane)
            assert all(before.x1 <= after.x0 + 1e-6 for before, after in pairwise(spots))


def test_timeline_of_a_long_run_shows_its_end_in_full() -> None:
    whole, end = make_timelines(make_ledger(9000, num_workers=2, slots=8))
    assert whole.notes[0].startswith("Drawn: one in 4 of the ")
    assert sum(len(band.spots) for band in end.bands) == 800
    assert end.x_name.startswith("seconds, from ")


def test_timeline_of_many_workers_stays_on_one_page() -> None:
    ledger = RunLedger(3000, STARTED)
    for line in range(3000):
        ledger.add(make_record(line, end=1 + line / 10_000, worker=line % 100))
    (timeline,) = make_timelines(ledger)
    assert len(timeline.bands) == 64
    assert timeline.notes[-1] == "36 more workers not drawn."
    assert sum(band.height_px for band in timeline.bands) <= 2 * ROOM_PX

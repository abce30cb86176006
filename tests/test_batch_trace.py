"""The trace of a batch run: lanes that never overlap, phases that join, and a file that survives a kill and a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batch_run import STARTED, make_record, make_run
from conftest import REPO, wait_for

from enginepool.batch import trace
from enginepool.batch.trace import TraceWriter
from enginepool.batch.trace_lanes import RUN_PID, RunTrace
from enginepool.clock import Timings
from enginepool.errors import SettingsError

ENDLESS = """
import sys
sys.path.insert(0, sys.argv[1])
from itertools import count
from batch_run import make_record
from enginepool.batch.trace import TraceWriter
writer = TraceWriter(sys.argv[2], print)
for line in count(1):
    writer.add(make_record(line, end=line / 100))
"""


def write(path: Path, *records: Any) -> list[dict[str, Any]]:
    with TraceWriter(str(path), pytest.fail) as writer:
        for record in records:
            writer.add(record)
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def overlaps(events: list[dict[str, Any]]) -> list[Any]:
    lanes = defaultdict(list)
    for event in spans(events):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return [pair for lane in lanes.values() for pair in pairwise(sorted(lane)) if pair[1][0] < pair[0][1]]


def test_trace_has_every_line_once_in_lanes_that_do_not_overlap(tmp_path: Path) -> None:
    events = write(tmp_path / "trace.json", *make_run(2000, num_workers=3, slots=8))
    assert overlaps(events) == []
    assert {event["args"]["line"] for event in spans(events)} == set(range(1, 2001))
    decoded = Counter(event["args"]["line"] for event in spans(events) if event["name"] == "decode")
    assert set(decoded.values()) == {1}
    assert Counter(event["pid"] for event in events if event["name"] == "thread_name") == {0: 8, 1: 8, 2: 8}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {RUN_PID: "run-batch", 0: "worker 0", 1: "worker 1", 2: "worker 2"}


def test_trace_line_has_three_phases_that_join(tmp_path: Path) -> None:
    events = spans(write(tmp_path / "trace.json", make_record(7, end=1.0, tokens=12, attempts=2)))
    assert [event["name"] for event in events] == ["queued", "prefill", "decode"]
    assert [event["ts"] - round(STARTED * 1e6) for event in events] == [200_000, 300_000, 500_000]
    assert [event["dur"] for event in events] == [100_000, 200_000, 400_000]
    assert events[0]["args"] == {"line": 7, "tokens": 12, "prompt_tokens": 20, "custom_id": "request-7", "attempts": 2}


def test_trace_failed_line_ends_in_its_code(tmp_path: Path) -> None:
    stamps = Timings(submitted=STARTED, leased=STARTED + 1, delivered=STARTED + 3)
    events = spans(write(tmp_path / "trace.json", make_record(code="worker_lost", timings=stamps)))
    assert [(event["name"], event["dur"], event["args"]["code"], event["cname"]) for event in events] == [
        ("worker_lost", 2_000_000, "worker_lost", "terrible")
    ]


def test_trace_line_that_reached_no_worker_is_an_instant(tmp_path: Path) -> None:
    events = write(tmp_path / "trace.json", make_record(code="invalid_request", worker=None, end=2.0))
    assert [(event["name"], event["ph"], event["pid"]) for event in events[2:] if event["ph"] != "C"] == [("invalid_request", "i", RUN_PID)]


@pytest.mark.parametrize("timings", [Timings(), Timings(submitted=STARTED), Timings(finished=STARTED)])
def test_trace_line_without_timings_is_left_out(timings: Timings) -> None:
    assert [event for event in RunTrace().ended(make_record(timings=timings)) if event.ph != "C"] == []


def test_trace_counts_lines_once_a_second(tmp_path: Path) -> None:
    events = write(
        tmp_path / "trace.json", *(make_record(line, end=line / 10, code="timeout" if line % 2 else None) for line in range(1, 41))
    )
    counts = [(event["args"]["ok"], event["args"]["failed"]) for event in events if event["ph"] == "C"]
    assert counts == [(0, 1), (5, 6), (10, 11), (15, 16)]


def test_trace_takes_any_text(tmp_path: Path) -> None:
    events = spans(write(tmp_path / "trace.json", make_record(custom_id='</script>"\ud800\n\x00')))
    assert events[0]["args"]["custom_id"] == '</script>"\\ud800\n\x00'


def test_trace_that_was_not_closed_lacks_only_its_bracket(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace.json"), pytest.fail)
    writer.add(make_record())
    writer.flush()
    text = (tmp_path / "trace.json").read_text()
    assert len(spans(json.loads(text + "]"))) == 3
    writer.close()


def test_trace_of_a_killed_run_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    child = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(REPO / "tests"), str(path)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: path.exists() and path.stat().st_size > 100_000, "some of the trace")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    whole = path.read_text().rpartition(",\n")[0]  # a viewer forgives half an event at the end
    assert overlaps(json.loads(whole + "]")) == []


def test_trace_is_written_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(trace, "monotonic", lambda: now)
    path = tmp_path / "trace.json"
    with TraceWriter(str(path), pytest.fail) as writer:
        writer.add(make_record(1))
        size = path.stat().st_size
        writer.add(make_record(2, end=1.5))
        assert path.stat().st_size == size
        now += 1.0
        writer.add(make_record(3, end=2.5))
        assert path.stat().st_size > size


def test_trace_on_a_full_disk_ends_with_one_warning() -> None:
    warnings: list[str] = []
    writer = TraceWriter("/dev/full", warnings.append)
    for line in range(3):
        writer.add(make_record(line))
        writer.flush()
    writer.close()
    assert warnings == ["warning: trace /dev/full: No space left on device; the trace ends here, the run goes on"]


def test_trace_that_can_not_be_written_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"trace /nowhere/trace\.json"):
        TraceWriter("/nowhere/trace.json", pytest.fail)

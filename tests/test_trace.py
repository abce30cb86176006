"""The trace: lanes, phases, deaths; a file that is valid JSON after a stop and loadable after a kill; failures that end only the trace."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Serve, kill_when, wait_for

from enginepool import Pool, SamplingParams
from enginepool.clock import ClockAnchor, EngineStamps
from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.leases import Leases
from enginepool.dispatcher.observer import Observer
from enginepool.dispatcher.trace import NOTHING_REACHED, TraceLanes
from enginepool.errors import Code, ExitCode, ItemError, SettingsError
from enginepool.protocol import NO_STAMPS
from enginepool.trace_event import Event
from enginepool.trace_file import MAX_BUFFERED_BYTES, TraceFile

Span = tuple[int, int, str]
SCRIPT = "[engine_args]\nstep_s = 0.001\nmax_num_seqs = 4\n"


class Bench:
    """Leases and lanes of two workers, without the rest of a dispatcher. Unix time is monotonic time plus 1000."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.lanes = TraceLanes(2, 1000.0)
        self.events: list[Event] = []

    def lease(self, *seqs: int, worker: int = 0, now: float = 1.0) -> list[Item]:
        items = [Item(b"\xab\xcd", seq, b"", 0.5) for seq in seqs]
        self.lease_items(items, worker=worker, now=now)
        return items

    def lease_items(self, items: list[Item], *, worker: int, now: float) -> None:
        self.leases.grant(items, worker, now)
        self.events += self.lanes.leased(worker, items, now)

    def end(self, item: Item, now: float, scheduled: float | None = None, first: float | None = None, last: float | None = None) -> None:
        self.events += self.lanes.ended(item, None, (scheduled, first, last, 7), now)

    @property
    def spans(self) -> list[tuple[str, int, int | None, int, int]]:
        return [(e.name, e.pid, e.tid, (e.ts or 0) - 1_000_000_000, e.dur or 0) for e in self.events if e.ph == "X"]


def test_item_has_three_phases_that_join() -> None:
    bench = Bench()
    (item,) = bench.lease(5, now=1.0)
    bench.end(item, 2.0, 1.1, 1.4, 1.9)
    assert bench.spans == [
        ("queued", 0, 0, 1_000_000, 100_000),
        ("prefill", 0, 0, 1_100_000, 300_000),
        ("decode", 0, 0, 1_400_000, 500_000),
    ]
    args = {"item": 5, "lease": 1, "client": "abcd", "attempt": 1, "waited_s": 0.5, "tokens": 7}
    assert [event.args for event in bench.events if event.ph == "X"] == [args] * 3


def test_attempt_takes_the_lowest_free_lane_of_its_worker() -> None:
    bench = Bench()
    first, second, third = bench.lease(1, 2, 3)
    bench.end(second, 2.0)
    bench.end(first, 2.1)
    bench.lease(4, 5, 6, now=3.0)
    bench.lease(7, worker=1)
    assert [(attempt.args["item"], attempt.lane) for attempt in bench.lanes._attempts[0].values()] == [(3, 2), (4, 0), (5, 1), (6, 3)]
    assert [attempt.lane for attempt in bench.lanes._attempts[1].values()] == [0]
    names = [(event.pid, event.tid) for event in bench.events if event.name == "thread_name"]
    assert names == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert third.lease == 3


def test_item_with_an_error_ends_in_a_span_named_by_its_code() -> None:
    bench = Bench()
    (item,) = bench.lease(1)
    bench.events += bench.lanes.ended(item, ItemError(Code.ABORTED, "aborted"), (1.5, None, None, 0), 2.0)
    assert bench.spans == [("queued", 0, 0, 1_000_000, 500_000), ("aborted", 0, 0, 1_500_000, 500_000)]
    assert bench.events[-1].args is not None
    assert bench.events[-1].args["error"] == "aborted"


def test_item_without_stamps_is_one_span() -> None:
    bench = Bench()
    (item,) = bench.lease(1)
    bench.events += bench.lanes.ended(item, None, NOTHING_REACHED, 2.0)
    assert bench.spans == [("run", 0, 0, 1_000_000, 1_000_000)]


def test_equal_stamps_give_the_shortest_spans_that_viewers_draw_apart() -> None:
    bench = Bench()
    (item,) = bench.lease(1)
    bench.end(item, 1.0, 1.0, 1.0, 1.0)
    assert [span[3:] for span in bench.spans] == [(1_000_000, 1), (1_000_001, 1), (1_000_002, 1)]


def test_next_attempt_in_a_lane_starts_after_the_one_before() -> None:
    bench = Bench()
    (item,) = bench.lease(1, now=1.0)
    bench.end(item, 2.01, 1.5, 1.6, 2.005)
    (item,) = bench.lease(2, now=2.0)  # the turn's time was taken before the last result was read
    bench.end(item, 3.0, 2.5, 2.6, 2.9)
    assert [span[3:] for span in bench.spans[2:4]] == [(1_600_000, 405_000), (2_005_000, 495_000)]


def test_death_ends_the_lanes_as_lost_and_the_retry_has_a_lane_elsewhere() -> None:
    bench = Bench()
    items = bench.lease(1, 2, worker=0)
    bench.leases.revoke(0)
    bench.events += bench.lanes.worker_died(0, 1.5)
    bench.lease_items(items, worker=1, now=1.6)
    for item in items:
        bench.end(item, 2.0, 1.7, 1.8, 1.9)
    assert [span[:3] for span in bench.spans[:3]] == [("lost", 0, 0), ("lost", 0, 1), ("queued", 1, 0)]
    assert [event.args["attempt"] for event in bench.events if event.ph == "X" and event.args] == [1, 1, 2, 2, 2, 2, 2, 2]


def test_convicted_item_is_lost_only_once() -> None:
    bench = Bench()
    (item,) = bench.lease(1)
    bench.leases.revoke(0)
    bench.events += bench.lanes.worker_died(0, 1.5)
    bench.events += bench.lanes.ended(item, ItemError(Code.WORKER_LOST, "lost"), NOTHING_REACHED, 1.5)
    assert [span[0] for span in bench.spans] == ["lost"]


def test_item_that_never_had_a_lane_is_an_instant() -> None:
    lanes = TraceLanes(1, 0.0)
    (event,) = lanes.ended(Item(b"c", 3, b"", 0.5), ItemError(Code.DEADLINE_EXCEEDED, "late"), NOTHING_REACHED, 1.0)
    assert (event.name, event.ph, event.pid) == ("deadline_exceeded", "i", lanes.dispatcher_pid)


# The file.


def test_file_is_json_whenever_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceFile(str(path), pytest.fail)
    writer.add(TraceLanes(1, 0.0).names())
    writer.flush()
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    assert len(json.loads(path.read_text() + "]")) == 4  # what viewers make of a trace without its end
    writer.close()
    assert len(json.loads(path.read_text())) == 4
    writer.close()


def test_full_buffer_is_written_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceFile(str(path), pytest.fail)
    writer.add([Event("x" * 1024, "i", 0)] * (MAX_BUFFERED_BYTES // 1024))
    assert path.stat().st_size >= MAX_BUFFERED_BYTES
    writer.close()


def test_old_trace_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("x" * 10_000)
    writer = TraceFile(str(path), pytest.fail)
    writer.add([Event("a", "i", 0)])
    writer.close()
    assert json.loads(path.read_text()) == [{"name": "a", "ph": "i", "pid": 0}]


def test_write_error_ends_the_trace_with_one_warning() -> None:
    warnings: list[str] = []
    writer = TraceFile("/dev/full", warnings.append)
    for _ in range(3):
        writer.add([Event("a", "i", 0)])
        writer.flush()
    writer.close()
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


@pytest.mark.parametrize("path", ["/nowhere/trace.json", "/", ""], ids=["no-folder", "a-folder", "empty"])
def test_path_that_can_not_be_written_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match="trace"):
        TraceFile(path, pytest.fail)


def test_pipe_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match="trace"):
        TraceFile(str(tmp_path / "fifo"), pytest.fail)


def test_file_of_another_pool_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceFile(str(path), pytest.fail)
    writer.add([Event("a", "i", 0)])
    writer.flush()
    with pytest.raises(SettingsError, match="another pool"):
        TraceFile(str(path), pytest.fail)
    writer.close()
    assert len(json.loads(path.read_text())) == 1


# The observer.


@pytest.mark.parametrize("raw", [NO_STAMPS, msgspec.Raw(b"\x07")], ids=["none", "rubbish"])
def test_observer_takes_an_item_without_readable_stamps(raw: msgspec.Raw) -> None:
    observer = Observer(1, ClockAnchor.take(), None)
    delivered: list[Any] = []
    observer.before(lambda *given: delivered.append(given))(Item(b"c", 1, b"", time.monotonic()), b"text", None, raw)
    assert delivered[0][1:] == (b"text", None, raw)
    summary = observer.latency.summary(time.monotonic())
    assert summary is not None
    assert (summary.ended, summary.ttft_s) == (1, None)


def test_observer_measures_from_received_to_each_milestone() -> None:
    observer = Observer(1, ClockAnchor.take(), None)
    now = time.monotonic()
    item = Item(b"c", 1, b"", now - 10)
    item.leased = now - 8
    stamps = msgspec.Raw(msgspec.msgpack.encode(EngineStamps(first_token=now - 7)))
    observer.before(lambda *_: None)(item, b"", None, stamps)
    summary = observer.latency.summary(time.monotonic())
    assert summary is not None
    assert summary.waiting_s is not None
    assert summary.ttft_s is not None
    assert summary.total_s is not None
    assert summary.waiting_s.p50 == pytest.approx(2)
    assert summary.ttft_s.p50 == pytest.approx(3)
    assert summary.total_s.p50 >= 10


# Served pools.


def spans_by_lane(events: Iterable[dict[str, Any]]) -> dict[tuple[int, int], list[Span]]:
    lanes: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {lane: sorted(spans) for lane, spans in lanes.items()}


def overlaps(events: Iterable[dict[str, Any]]) -> list[tuple[Span, Span]]:
    return [(before, after) for spans in spans_by_lane(events).values() for before, after in pairwise(spans) if after[0] < before[1]]


def serve_traced(serve: Serve, folder: Path, *arguments: str) -> tuple[Any, Path]:
    (folder / "pool.toml").write_text(SCRIPT)
    path = folder / "trace.json"
    served = serve("--engine", "echo", "--workers", "2", "--config", str(folder / "pool.toml"), "--trace", str(path), *arguments)
    served.ready_line()
    return served, path


def test_trace_of_a_pool_has_each_item_once_in_lanes_that_do_not_overlap(serve: Serve, tmp_path: Path) -> None:
    started = time.time()
    served, path = serve_traced(serve, tmp_path)
    with Pool.connect() as pool:
        outputs = pool.generate_many([f"prompt {number}" for number in range(200)], SamplingParams(max_tokens=5))
    served.process.terminate()
    assert served.finish()[0] == ExitCode.OK
    events = json.loads(path.read_text())
    decoded = [event for event in events if event["name"] == "decode"]
    assert Counter(event["args"]["item"] for event in decoded) == dict.fromkeys(range(len(outputs)), 1)
    assert {event["args"]["tokens"] for event in decoded} == {5}
    assert Counter(event["name"] for event in events if event["ph"] == "X") == dict.fromkeys(("queued", "prefill", "decode"), 200)
    assert overlaps(events) == []
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")
    assert all(started * 1e6 - 1e6 < event["ts"] < time.time() * 1e6 + 1e6 for event in events if "ts" in event)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"backlog", "in flight"}
    assert Counter(event["name"] for event in events if event["ph"] == "i") == {"started": 2, "ready": 2, "exited with code 0": 2}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"worker 0", "worker 1", "dispatcher"}


def test_item_that_died_with_its_worker_is_lost_in_one_lane_and_decoded_in_another(serve: Serve, tmp_path: Path) -> None:
    served, path = serve_traced(serve, tmp_path)
    with Pool.connect() as pool:
        pid = pool.status().workers[0].pid
        assert pid is not None
        killer = kill_when(lambda: pool.status().finished >= 10, "ten results", pid)
        outputs = pool.generate_many(["again"] * 100, SamplingParams(max_tokens=20))
        killer.join()
    assert all(output.ok for output in outputs)
    served.process.terminate()
    assert served.finish()[0] == ExitCode.OK
    events = json.loads(path.read_text())
    lost = {event["args"]["item"] for event in events if event["name"] == "lost"}
    retried = {event["args"]["item"] for event in events if event["name"] == "decode" and event["args"]["attempt"] == 2}
    assert lost
    assert lost == retried
    assert Counter(Counter(event["args"]["item"] for event in events if event["name"] == "decode").values()) == {1: 100}
    assert overlaps(events) == []
    assert any("SIGKILL" in event["name"] for event in events if event["ph"] == "i")


def test_trace_of_a_killed_dispatcher_lacks_only_its_end(serve: Serve, tmp_path: Path) -> None:
    served, path = serve_traced(serve, tmp_path)
    with Pool.connect() as pool:
        pool.generate_many(["hello"] * 20, SamplingParams(max_tokens=3))
        wait_for(lambda: path.read_text().count('"decode"') == 20, "the items in the file")
        os.kill(served.pid, signal.SIGKILL)
        served.finish()
        pool.close(drain=False)
    assert overlaps(json.loads(path.read_text() + "]")) == []


def test_full_disk_ends_the_trace_and_not_the_pool(serve: Serve) -> None:
    served = serve("--engine", "echo", "--trace", "/dev/full")
    served.ready_line()
    with Pool.connect() as pool:
        assert pool.generate("hello", SamplingParams(max_tokens=3)).ok
    served.process.terminate()
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert stderr.count("No space left on device") == 1


def test_unwritable_trace_is_told_before_any_worker_is_started(serve: Serve) -> None:
    served = serve("--engine", "echo", "--trace", "/nowhere/trace.json")
    code, stderr = served.finish()
    assert code == ExitCode.USAGE
    assert "trace /nowhere/trace.json: No such file or directory" in stderr
    assert "started" not in stderr


def test_trace_is_a_keyword_of_pool(tmp_path: Path, fresh_run_dir: Path) -> None:
    path = tmp_path / "trace.json"
    with Pool(engine="echo", trace=str(path)) as pool:
        pool.generate("hello", SamplingParams(max_tokens=3))
    assert "decode" in {event["name"] for event in json.loads(path.read_text())}

"""What `status` shows: it fits every size, drops the least important first, and says in words what happened."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from rich.console import Console, Group

from enginepool.client.columns import Column, lay_out
from enginepool.client.status_view import render
from enginepool.client.units import format_bytes, format_cpus, format_rate, format_seconds, format_span, shorten_exit
from enginepool.dispatcher.supervisor import describe_exit
from enginepool.status import LatencySummary, Percentiles, PoolState, PoolStatus, WorkerState, WorkerStatus

LATENCY = LatencySummary(2310, 1, 38.2, Percentiles(0.012, 0.234, 1.5), Percentiles(0.08, 0.5, 2.5), Percentiles(3.1, 8.4, 12.25))


def make_worker(index: int, **changes: Any) -> WorkerStatus:
    worker = WorkerStatus(
        index=index,
        pid=4711 + index,
        state=WorkerState.READY,
        stage="ready",
        in_flight=40,
        running=32,
        waiting=8,
        restarts=0,
        last_exit=None,
        cpus=[2 * index, 2 * index + 1],
        devices=[],
        prompt_tokens=10_000,
        generation_tokens=123_456,
        prompt_tokens_per_s=123.4,
        generation_tokens_per_s=1830.2,
        kv_cache_usage=0.43,
        rss_bytes=2300 << 20,
    )
    return msgspec.structs.replace(worker, **changes)


def make_status(num_workers: int = 2, **changes: Any) -> PoolStatus:
    status = PoolStatus(
        pool_id="0123456789ab",
        pid=4700,
        state=PoolState.READY,
        reason=None,
        model="SmolLM2-135M-Instruct",
        endpoint="ipc:///run/user/1000/enginepool/default.sock",
        uptime_s=3912.0,
        backlog=1204,
        backlog_bytes=99_999,
        in_flight=80,
        finished=10_233,
        failed=3,
        clients=3,
        clock_drift_s=0.0001,
        rss_bytes=48 << 20,
        dropped_log_lines=0,
        workers=[make_worker(index) for index in range(num_workers)],
        latency=LATENCY,
    )
    return msgspec.structs.replace(status, **changes)


def show(status: PoolStatus, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(Group(*render(status, width, height, "q quits")))
    return console.export_text().splitlines()


def text_of(status: PoolStatus, width: int = 160, height: int | None = None) -> str:
    return "\n".join(show(status, width, height))


@pytest.mark.parametrize("num_workers", [1, 2, 8, 64])
@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [1, 4, 10, 15, 24, 50])
def test_any_size_is_kept(width: int, height: int, num_workers: int) -> None:
    status = make_status(num_workers, state=PoolState.DEGRADED, reason="worker 0: exited with code 9\n" * 20)
    lines = show(status, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("SmolLM2-135M-Instruct"[: width - 1])


@pytest.mark.parametrize(("width", "height"), [(60, 15), (80, 24), (200, 50)])
def test_workers_that_do_not_fit_are_counted(width: int, height: int) -> None:
    lines = show(make_status(64), width, height)
    shown = [line for line in lines if " ready " in line and "SmolLM2" not in line]
    assert len(lines) == height
    assert lines[-1] == f"… and {64 - len(shown)} more"
    assert len(shown) >= 3


def test_small_terminal_shows_every_block() -> None:
    text = text_of(make_status(), 60, 15)
    for word in ("in backlog", "in flight", "items/s", "tokens/s out", "p99", "first token", "ready", "tok/s out"):
        assert word in text


def test_narrow_terminal_drops_the_least_important_columns_first() -> None:
    heads = [next(line for line in show(make_status(), width) if line.startswith("#")) for width in (160, 90, 75, 50)]
    kept = [set(head.split()) for head in heads]
    assert {"cpus", "memory", "restarts", "pid"} <= kept[0]
    assert all(narrower <= wider for wider, narrower in pairwise(kept))
    assert "cpus" not in kept[1]
    assert {"#", "state", "run"} <= kept[3]


def test_starting_worker_shows_its_stage_and_last_exit() -> None:
    last_exit = describe_exit(-9)
    worker = make_worker(0, state=WorkerState.STARTING, stage="loading the model", last_exit=last_exit, since_last_exit_s=12.4)
    text = text_of(make_status(workers=[worker]))
    assert "starting: loading the model" in text
    assert "SIGKILL, 12 s ago" in text


def test_long_stage_is_cut() -> None:
    worker = make_worker(0, state=WorkerState.STARTING, stage="x" * 100)
    assert "starting: " + "x" * 27 + "…" in text_of(make_status(workers=[worker]))


def test_worker_without_a_process_has_no_load() -> None:
    worker = make_worker(0, state=WorkerState.FAILED, stage="failed", pid=None, rss_bytes=None, kv_cache_usage=None)
    row = next(line for line in show(make_status(workers=[worker]), 160) if "failed" in line and line.startswith("0"))
    assert row.split()[:6] == ["0", "-", "failed", "40", "-", "-"]


def test_idle_minute_is_shown_as_dashes() -> None:
    lines = show(make_status(latency=None), 100)
    assert [line.split()[-3:] for line in lines if line.startswith(("waiting", "first token", "total"))] == [["-"] * 3] * 3


def test_devices_have_a_column_where_there_are_any() -> None:
    assert "devices" not in text_of(make_status())
    assert "devices" in text_of(make_status(workers=[make_worker(0, devices=["0", "1"])]), 200)


def test_reason_is_shown_whole_where_there_is_room() -> None:
    reason = "\n".join(f"worker {index}: why" for index in range(8))
    assert "worker 7: why" in text_of(make_status(reason=reason))
    assert "worker 7: why" not in text_of(make_status(reason=reason), 100, 24)


def test_columns_of_rank_0_stay_even_without_room() -> None:
    lines = lay_out([Column("name", 0, ["x" * 30]), Column("rest", 1, ["y"])], 10)
    assert [line.plain for line in lines] == [" " * 26 + "name", "x" * 30]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0.00 ms"), (0.00042, "0.42 ms"), (0.0183, "18.3 ms"), (0.9994, "999 ms"), (1.0, "1.00 s"), (312.4, "312 s")],
)
def test_seconds_have_three_digits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")])
def test_spans_have_one_unit(seconds: float, text: str) -> None:
    assert format_span(seconds) == text


def test_numbers_are_short() -> None:
    assert [format_bytes(None), format_bytes(48 << 20), format_bytes(40 << 30)] == ["-", "48 MiB", "40.0 GiB"]
    assert [format_rate(0), format_rate(0.25), format_rate(12_345.6)] == ["0", "0.2", "12,346"]
    assert format_cpus([8, 0, 1, 2]) == "0-2,8"
    exits = [*(describe_exit(code) for code in (-11, 9, -35)), "odd"]
    assert [shorten_exit(text) for text in exits] == ["SIGSEGV", "code 9", "signal 35", "odd"]


def test_paused_clients_are_shown_where_there_are_any() -> None:
    assert "2 other clients (1 paused), ipc://" in text_of(make_status(paused_clients=1))
    assert "paused" not in text_of(make_status())

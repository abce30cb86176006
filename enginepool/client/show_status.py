"""`status`: a pool as a table on the terminal, as JSON for programs, once or again and again."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from enginepool import rundir
from enginepool.client.connection import Connection
from enginepool.errors import ExitCode
from enginepool.status import PoolStatus, WorkerStatus

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_S = 1.0


def run_status(endpoint: str | None, *, as_json: bool, watch: bool) -> int:
    """Print the status once, or with `watch` every second until interrupted. Raises NoDispatcher."""
    connection = Connection(endpoint or rundir.default_endpoint())
    try:
        if watch:
            _watch(connection, as_json=as_json)
        elif as_json:
            _print_json(connection.status())
        else:
            from rich.console import Console

            Console().print(render(connection.status()))
    finally:
        connection.close()
    return ExitCode.OK


def render(status: PoolStatus) -> Group:
    """The status as rich renderables: two lines and a table."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = f"{status.model}: {status.state.value}, up {status.uptime_s:.0f} s"
    dispatcher = (
        f"dispatcher {status.pid} ({_mebibytes(status.rss_bytes)} MiB) at {status.endpoint}, {max(0, status.clients - 1)} other clients"
    )
    counts = f"{status.backlog} waiting, {status.in_flight} in flight, {status.finished} ended ({status.failed} failed)"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("#", "pid", "state", "in hand", "run", "tok/s", "tokens", "KV", "MiB", "restarts", "cpus"):
        table.add_column(name, justify="left" if name in ("state", "cpus") else "right")
    for worker in status.workers:
        table.add_row(*_row(worker))
    stages = [Text(f"worker {worker.index}: {worker.stage}") for worker in status.workers if worker.stage != worker.state.value]
    exits = [Text(f"worker {worker.index} last {worker.last_exit}", style="yellow") for worker in status.workers if worker.last_exit]
    reason = [Text(status.reason, style="red")] if status.reason else []
    return Group(Text(head), Text(dispatcher), Text(counts), *reason, table, *stages, *exits)


def _row(worker: WorkerStatus) -> list[str]:
    return [
        str(worker.index),
        str(worker.pid or "-"),
        worker.state.value,
        str(worker.in_flight),
        str(worker.running),
        f"{worker.generation_tokens_per_s:.0f}",
        str(worker.generation_tokens),
        "-" if worker.kv_cache_usage is None else f"{worker.kv_cache_usage:.0%}",
        _mebibytes(worker.rss_bytes),
        str(worker.restarts),
        format_cpus(worker.cpus),
    ]


def _watch(connection: Connection, *, as_json: bool) -> None:
    pause = threading.Event()
    if as_json or not sys.stdout.isatty():
        while True:
            _print_json(connection.status())
            pause.wait(REFRESH_S)
    from rich.live import Live

    with Live(render(connection.status()), auto_refresh=False) as live:
        while not pause.wait(REFRESH_S):
            live.update(render(connection.status()), refresh=True)


def _print_json(status: PoolStatus) -> None:
    print(msgspec.json.encode(status).decode(), flush=True)


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / (1 << 20):,.0f}"


def format_cpus(cpus: list[int]) -> str:
    """Consecutive numbers as ranges: 0-3,8."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][-1] + 1:
            spans[-1][1:] = [cpu]
        else:
            spans.append([cpu])
    return ",".join("-".join(map(str, span)) for span in spans)

"""`status`: a pool as a table on the terminal, as JSON for programs, once or again and again."""

from __future__ import annotations

import os
import sys
import threading

import msgspec

from enginepool import rundir
from enginepool.client.connection import Connection
from enginepool.errors import ExitCode
from enginepool.status import PoolStatus

PIPED_WIDTH = 200


def run_status(endpoint: str | None, keys: str | None, *, as_json: bool, watch: bool, interval_s: float = 1.0) -> int:
    """Print the status once, or with `watch` again and again until interrupted. Raises NoDispatcher, PoolLost."""
    target, keys_path = rundir.choose_target(endpoint, keys)
    connection = Connection(target, keys=keys_path)
    try:
        if watch and not as_json and _can_redraw():
            from enginepool.client.watch import watch as watch_on_terminal

            return watch_on_terminal(connection, interval_s)
        if watch:
            _repeat_json(connection, interval_s)
        elif as_json:
            _print_json(connection.status())
        else:
            _print_table(connection.status())
    finally:
        connection.close()
    return ExitCode.OK


def _can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _repeat_json(connection: Connection, interval_s: float) -> None:
    pause = threading.Event()
    while True:
        _print_json(connection.status())
        pause.wait(interval_s)


def _print_json(status: PoolStatus) -> None:
    print(msgspec.json.encode(status).decode(), flush=True)


def _print_table(status: PoolStatus) -> None:
    """On a terminal as wide as that is; elsewhere no column is left out."""
    from rich.console import Console

    from enginepool.client.status_view import render

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for line in render(status, console.width):
        console.print(line, soft_wrap=True)  # an endpoint or a reason is shown whole

"""`drain` and `stop`: ask a running pool to end, and wait until it has."""

from __future__ import annotations

import sys

from enginepool import rundir
from enginepool.client.connection import Connection
from enginepool.errors import ExitCode
from enginepool.protocol import Drain, Stop

STOP_WAIT_S = 60.0


def drain(endpoint: str | None, keys: str | None, limit_s: float | None) -> int:
    """Ask the pool to finish and stop; returns when its dispatcher is gone."""
    connection = _connect(endpoint, keys)
    status = connection.status()
    print(f"draining {connection.endpoint}: {status.backlog} waiting, {status.in_flight} in flight", file=sys.stderr)
    connection.post(Drain(limit_s))
    return _wait(connection, None)


def stop(endpoint: str | None, keys: str | None) -> int:
    """Ask the pool to stop now; returns when its dispatcher is gone."""
    connection = _connect(endpoint, keys)
    connection.post(Stop())
    return _wait(connection, STOP_WAIT_S)


def _connect(endpoint: str | None, keys: str | None) -> Connection:
    target, keys_path = rundir.choose_target(endpoint, keys)
    return Connection(target, keys=keys_path)


def _wait(connection: Connection, timeout_s: float | None) -> int:
    is_gone = connection.changes.wait_until(lambda: connection.is_lost, timeout_s)
    connection.close()
    if not is_gone:
        print("the dispatcher has not stopped yet", file=sys.stderr)
        return ExitCode.FAILED
    farewell = connection.farewell
    if farewell is None:
        print("the dispatcher is gone without a word; it was killed", file=sys.stderr)
        return ExitCode.FAILED
    items = "item" if farewell.num_returned == 1 else "items"
    returned = f"; {farewell.num_returned} unfinished {items} returned as retryable" if farewell.num_returned else ""
    reached = "the limit was reached: " if farewell.exit_code == ExitCode.DRAIN_LIMIT else ""
    print(f"{reached}stopped{returned}", file=sys.stderr)
    return farewell.exit_code

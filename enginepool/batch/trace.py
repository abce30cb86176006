"""`run-batch --trace`: the Chrome trace of a run, written as its lines end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from enginepool.batch.ledger import LineRecord
from enginepool.batch.trace_lanes import RunTrace
from enginepool.clock import monotonic
from enginepool.trace_file import TraceFile

FLUSH_S = 1.0


class TraceWriter:
    """Appends the events of ended lines to a file, at most FLUSH_S late while lines end.

    A write error ends the trace with one call of `warn`, and the run goes on. Raises SettingsError when the file can't be opened.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self._file = TraceFile(path, warn, owner="run")
        self._run = RunTrace()
        self._file.add(self._run.names())
        self._next_flush = monotonic()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(self, record: LineRecord) -> None:
        """Write how a line has ended."""
        self._file.add(self._run.ended(record))
        now = monotonic()
        if now >= self._next_flush:
            self._next_flush = now + FLUSH_S
            self._file.flush()

    def flush(self) -> None:
        """Write what is still in memory."""
        self._file.flush()

    def close(self) -> None:
        """End the array."""
        self._file.close()

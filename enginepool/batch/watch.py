"""Everybody who is told how a run goes: the ledger, the live view, the trace, and notices on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from enginepool.batch.ledger import LineRecord, RunLedger
from enginepool.batch.progress import BatchView
from enginepool.batch.trace import TraceWriter
from enginepool.status import PoolStatus

MOST_NOTICES = 20


class RunWatch:
    """Passes on what happens; the same notice is told once, and no more than MOST_NOTICES different ones."""

    def __init__(self, ledger: RunLedger, view: BatchView, trace: TraceWriter | None) -> None:
        self._ledger = ledger
        self._view = view
        self._trace = trace
        self._notices: set[str] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around the run."""
        self._view.open()
        self._view.update(self._ledger)
        try:
            yield
        finally:
            self._view.close()

    def ended(self, record: LineRecord) -> None:
        """A line has ended."""
        self._ledger.add(record)
        if self._trace is not None:
            self._trace.add(record)
        self._view.update(self._ledger)

    def status(self, status: PoolStatus) -> None:
        """What the pool does."""
        self._view.status(status)

    def notice(self, text: str) -> None:
        """Tell it, unless it was told before."""
        if text in self._notices or len(self._notices) >= MOST_NOTICES:
            return
        self._notices.add(text)
        say(text)


def say(text: str) -> None:
    """One line on stderr; a stderr that is closed is nobody's trouble."""
    with suppress(OSError, ValueError):
        print(f"enginepool run-batch: {text}", file=sys.stderr, flush=True)

"""Everybody who is told how a run goes: the ledger, the live view, the trace, and notices on stderr."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from enginepool.batch.ledger import LineRecord, RunLedger
from enginepool.batch.progress import BatchView
from enginepool.batch.trace import TraceWriter
from enginepool.status import PoolStatus

MOST_NOTICES = 20
UNHEARD = (OSError, ValueError)
"""What a stderr raises that is closed, or whose reader or terminal is gone: nobody's trouble."""


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
        self._show(self._view.open)
        try:
            yield
        finally:
            with suppress(*UNHEARD):
                self._view.close()

    def ended(self, record: LineRecord) -> None:
        """A line has ended."""
        self._ledger.add(record)
        if self._trace is not None:
            self._trace.add(record)
        self._show(lambda: self._view.update(self._ledger))

    def status(self, status: PoolStatus) -> None:
        """What the pool does."""
        self._show(lambda: self._view.status(status))

    @staticmethod
    def _show(show: Callable[[], None]) -> None:
        with suppress(*UNHEARD):
            if is_read():
                show()

    def notice(self, text: str) -> None:
        """Tell it, unless it was told before."""
        if text in self._notices or len(self._notices) >= MOST_NOTICES:
            return
        self._notices.add(text)
        say(text)


def say(text: str) -> None:
    """One line on stderr; one that nobody reads is left unsaid."""
    with suppress(*UNHEARD):
        if is_read():
            print(f"enginepool run-batch: {text}", file=sys.stderr, flush=True)


def is_read() -> bool:
    """Whether stderr takes a line without making the run wait; a pipe that is full does not."""
    poll = select.poll()
    try:
        poll.register(sys.stderr.fileno(), select.POLLOUT)
    except UNHEARD:  # no descriptor behind it
        return True
    return bool(poll.poll(0))

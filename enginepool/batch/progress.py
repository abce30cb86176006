"""The live view of a batch run on stderr: in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from enginepool.batch.ledger import RunLedger
from enginepool.batch.pace import Pace
from enginepool.batch.summary import progress_line, summary_lines
from enginepool.client.progress import is_terminal
from enginepool.clock import monotonic
from enginepool.status import PoolStatus

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["BatchView", "make_batch_view", "summary_lines"]

PLAIN_INTERVAL_S = 5.0
REDRAW_S = 0.2


class BatchView(Protocol):
    """Shows how far a run is. Its time passes with `update` and `status`, so call `status` about once a second."""

    def open(self) -> None:
        """The run begins."""

    def update(self, ledger: RunLedger) -> None:
        """A line has ended (called often; shown seldom)."""

    def status(self, status: PoolStatus) -> None:
        """The pool has told what it does."""

    def close(self) -> None:
        """The run is over, well or not."""


def make_batch_view(num_lines: int, *, quiet: bool) -> BatchView:
    """The view that fits stderr; none when `quiet`."""
    if quiet:
        return _Silent()
    return _Drawn(num_lines) if is_terminal() else _Lines(num_lines)


class _Silent:
    def open(self) -> None:
        pass

    def update(self, ledger: RunLedger) -> None:
        pass

    def status(self, status: PoolStatus) -> None:
        pass

    def close(self) -> None:
        pass


class _Paced:
    """Shows once an interval at most; an update in between costs one look at the clock."""

    def __init__(self, num_lines: int, interval_s: float) -> None:
        self._interval_s = interval_s
        self._ledger = RunLedger(num_lines, 0.0)
        self._status: PoolStatus | None = None
        self._pace = Pace(monotonic())
        self._next = 0.0

    def open(self) -> None:
        now = monotonic()
        self._pace = Pace(now)
        self._next = now + self._interval_s

    def update(self, ledger: RunLedger) -> None:
        self._ledger = ledger
        now = monotonic()
        if now >= self._next:
            self._show_now(now)

    def status(self, status: PoolStatus) -> None:
        self._status = status
        self.update(self._ledger)

    def close(self) -> None:
        self._show_now(monotonic())

    def _show_now(self, now: float) -> None:
        self._next = now + self._interval_s
        self._pace.update(now, self._ledger.ended_here, self._ledger.completion_tokens)
        self._show()

    def _show(self) -> None:
        raise NotImplementedError


class _Lines(_Paced):
    """The end is told by the summary, so nothing is printed at it."""

    def __init__(self, num_lines: int) -> None:
        super().__init__(num_lines, PLAIN_INTERVAL_S)

    def close(self) -> None:
        pass

    def _show(self) -> None:
        print(f"enginepool: {progress_line(self._ledger, self._pace, self._status)}", file=sys.stderr, flush=True)


class _Drawn(_Paced):
    def __init__(self, num_lines: int, console: Console | None = None) -> None:
        from enginepool.batch.live import LiveLines

        super().__init__(num_lines, REDRAW_S)
        self._live = LiveLines(console)

    def open(self) -> None:
        super().open()
        self._live.start()
        self._show()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._live.stop()

    def _show(self) -> None:
        from enginepool.batch.run_view import render_run

        self._live.draw(render_run(self._ledger, self._pace, self._status, *self._live.size))

"""Progress of long calls: a live bar on a terminal, one plain line every few seconds elsewhere. Always on stderr."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from enginepool.clock import monotonic

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_INTERVAL_S = 5.0
REDRAW_S = 0.1


class View(Protocol):
    """Shows how far a call is."""

    def update(self, done: int, failed: int, tokens: int) -> None:
        """Show these totals (called often; draws seldom)."""

    def __enter__(self) -> View: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def is_terminal() -> bool:
    """Whether stderr can redraw a line."""
    return bool(sys.stderr and sys.stderr.isatty()) and os.environ.get("TERM") != "dumb"


def make_view(total: int, *, is_shown: bool) -> View:
    """The view for this process's stderr."""
    if not is_shown:
        return _Silent()
    return _Bar(total) if is_terminal() else _Lines(total)


def describe_progress(done: int, total: int, failed: int, tokens: int, elapsed_s: float) -> str:
    """One plain line: items, failures, tokens/s of what has finished, time left at the present rate."""
    rate = tokens / elapsed_s if elapsed_s > 0 else 0.0
    left = f", about {(total - done) * elapsed_s / done:.0f} s left" if 0 < done < total else ""
    fails = f", {failed} failed" if failed else ""
    return f"{done}/{total} items{fails}, {rate:,.0f} tokens/s, {elapsed_s:.0f} s{left}"


class _Silent:
    def update(self, done: int, failed: int, tokens: int) -> None:
        pass

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total
        self._started = monotonic()
        self._next = self._started + PLAIN_INTERVAL_S
        self._last = (0, 0, 0)

    def update(self, done: int, failed: int, tokens: int) -> None:
        self._last = (done, failed, tokens)
        if monotonic() >= self._next:
            self._next = monotonic() + PLAIN_INTERVAL_S
            self._print()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self._print()

    def _print(self) -> None:
        done, failed, tokens = self._last
        line = describe_progress(done, self._total, failed, tokens, monotonic() - self._started)
        print(f"enginepool: {line}", file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, note="")
        self._started = monotonic()
        self._next = 0.0

    def update(self, done: int, failed: int, tokens: int) -> None:
        now = monotonic()
        if now >= self._next:
            self._next = now + REDRAW_S
            self._draw(done, failed, tokens)
        self._last = (done, failed, tokens)

    def __enter__(self) -> View:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(*self._last)
        self._progress.stop()

    def _draw(self, done: int, failed: int, tokens: int) -> None:
        rate = tokens / max(1e-9, monotonic() - self._started)
        fails = f"[red]{failed} failed[/] " if failed else ""
        self._progress.update(self._task, completed=done, note=f"{fails}{rate:,.0f} tok/s")

    _last = (0, 0, 0)


class LoadingView:
    """Shows the start-up stages of workers: one live line on a terminal, one plain line a stage elsewhere."""

    def __init__(self, *, is_shown: bool) -> None:
        self._stages: dict[int, str] = {}
        self._is_shown = is_shown
        self._started = monotonic()
        self._status = None
        if is_shown and is_terminal():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting workers")
            self._status.start()

    def stage(self, worker: int, text: str) -> None:
        """A worker has reached a stage."""
        self._stages[worker] = text
        if self._status is not None:
            parts = [f"worker {index}: {stage}" for index, stage in sorted(self._stages.items())]
            self._status.update(" · ".join(parts))
        elif self._is_shown:
            print(f"enginepool: worker {worker}: {text} ({monotonic() - self._started:.1f} s)", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()

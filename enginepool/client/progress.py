"""Progress of long calls: a live bar on a terminal or in a notebook, plain lines elsewhere (on stderr), or a callback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import msgspec

from enginepool.client.bars import Bar, NotebookBar, TerminalBar
from enginepool.client.notebook import is_notebook
from enginepool.clock import monotonic
from enginepool.errors import InvalidRequest

PLAIN_INTERVAL_S = 5.0
REDRAW_S = 0.1
CALLBACK_INTERVAL_S = 0.1


class Progress(msgspec.Struct, frozen=True):
    """How far a call is: items ended, of how many (None where that is unknown), failures among them, tokens of what has ended."""

    done: int
    total: int | None
    failed: int
    tokens: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the ended items over the whole time of the call."""
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left at the present rate; None while nothing has ended or the total is unknown."""
        if self.total is None or self.done == 0:
            return None
        return max(0, self.total - self.done) * self.elapsed_s / self.done


ProgressCallback = Callable[[Progress], None]


class View(Protocol):
    """Shows how far a call is. The caller of one that `is_live` updates it some ten times a second."""

    is_live: bool

    def update(self, done: int, failed: int, tokens: int) -> None:
        """Take these totals (called often; shown seldom)."""

    def __enter__(self) -> View: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def is_terminal() -> bool:
    """Whether stderr can redraw a line."""
    return bool(sys.stderr and sys.stderr.isatty()) and os.environ.get("TERM") != "dumb"


def make_view(total: int | None, progress: bool | ProgressCallback) -> View:
    """The view that the caller's `progress` asks for; `total` is None where nobody knows how many items will come."""
    if not callable(progress) and not isinstance(progress, bool):
        raise InvalidRequest(f"progress is True, False or a function of a Progress, not {progress!r:.40}")
    if callable(progress):
        return _Callback(total, progress)
    if not progress:
        return _Silent()
    if is_notebook():
        return _Drawn(total, NotebookBar(total))
    return _Drawn(total, TerminalBar(total)) if is_terminal() else _Lines(total)


def describe_progress(progress: Progress) -> str:
    """One plain line: items, failures, tokens/s of what has ended, time left at the present rate."""
    items = f"{progress.done} items" if progress.total is None else f"{progress.done}/{progress.total} items"
    fails = f", {progress.failed} failed" if progress.failed else ""
    is_under_way = progress.total is not None and progress.done < progress.total
    left = f", about {progress.left_s:.0f} s left" if is_under_way and progress.left_s is not None else ""
    return f"{items}{fails}, {progress.tokens_per_s:,.0f} tokens/s, {progress.elapsed_s:.0f} s{left}"


class _Silent:
    is_live = False

    def update(self, done: int, failed: int, tokens: int) -> None:
        pass

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Paced:
    """Shows once an interval at most, and at the end what was not shown yet."""

    is_live = True

    def __init__(self, total: int | None, interval_s: float, first_after_s: float = 0.0) -> None:
        self._total = total
        self._interval_s = interval_s
        self._started = monotonic()
        self._next = self._started + first_after_s
        self._last = (0, 0, 0)
        self._shown: tuple[int, int, int] | None = None

    def update(self, done: int, failed: int, tokens: int) -> None:
        self._last = (done, failed, tokens)
        now = monotonic()
        if now >= self._next:
            self._next = now + self._interval_s
            self._show_last()

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._shown != self._last:
            self._show_last()

    def _show_last(self) -> None:
        self._shown = done, failed, tokens = self._last
        self._show(Progress(done, self._total, failed, tokens, monotonic() - self._started))

    def _show(self, progress: Progress) -> None:
        raise NotImplementedError


class _Lines(_Paced):
    def __init__(self, total: int | None) -> None:
        super().__init__(total, PLAIN_INTERVAL_S, first_after_s=PLAIN_INTERVAL_S)

    def _show(self, progress: Progress) -> None:
        print(f"enginepool: {describe_progress(progress)}", file=sys.stderr, flush=True)


class _Drawn(_Paced):
    def __init__(self, total: int | None, bar: Bar) -> None:
        super().__init__(total, REDRAW_S)
        self._bar = bar

    def __enter__(self) -> View:
        self._bar.open()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__(None)
        finally:
            self._bar.close()

    def _show(self, progress: Progress) -> None:
        self._bar.draw(progress.done, progress.failed, progress.tokens_per_s)


class _Callback(_Paced):
    """Runs on the calling thread, so that what it raises ends the call like a Ctrl-C there."""

    def __init__(self, total: int | None, callback: ProgressCallback) -> None:
        super().__init__(total, CALLBACK_INTERVAL_S)
        self._callback = callback

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # what ended the call early must not be hidden by what the callback raises
            super().__exit__(None)

    def _show(self, progress: Progress) -> None:
        self._callback(progress)

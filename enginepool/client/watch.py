"""`status --watch` on a terminal: the status drawn in place until q, a signal, or the end of the pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType

from enginepool.client.connection import Connection
from enginepool.client.status_view import render
from enginepool.client.terminal import Terminal, Wakeups
from enginepool.clock import monotonic
from enginepool.errors import EnginePoolError, ExitCode, PoolLost
from enginepool.status import PoolState, PoolStatus

REDRAW_S = 1.0
ANSWER_S = 10.0
SILENT_AFTER_S = 3.0
QUIT_KEYS = frozenset(b"qQ\x04")
REDRAW_KEY = 0x0C
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Feed:
    """The newest status, asked for on a thread of its own so that a silent dispatcher holds up no key."""

    def __init__(self, connection: Connection, interval_s: float, wake: Callable[[], None]) -> None:
        self.status: PoolStatus = connection.status()
        self.lost: EnginePoolError | None = None
        self._answered_at = monotonic()
        self._connection = connection
        self._interval_s = interval_s
        self._wake = wake
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="enginepool-watch", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()

    @property
    def silent_s(self) -> float:
        """Seconds since the status that is overdue was last told; 0 while all is well."""
        age_s = monotonic() - self._answered_at
        return age_s if age_s > self._interval_s + SILENT_AFTER_S else 0.0

    def _run(self) -> None:
        while self.lost is None and not self._is_over.wait(self._interval_s):
            try:
                self.status = self._connection.status(ANSWER_S)
                self._answered_at = monotonic()
            except EnginePoolError:
                self.lost = self._connection.error
            self._wake()


def watch(connection: Connection, interval_s: float) -> ExitCode:
    """Draw until q is pressed. Raises PoolLost when the pool ends, KeyboardInterrupt on Ctrl-C; SIGTERM and SIGHUP end the process."""
    with Wakeups() as wakeups, Feed(connection, interval_s, wakeups.wake) as feed, Terminal() as terminal:
        ending = _show(wakeups, feed, terminal)
    if ending is signal.SIGINT:
        raise KeyboardInterrupt
    if ending is not None:
        os.kill(os.getpid(), ending)
    if feed.lost is not None:
        raise _explain(feed.lost, feed.status)
    return ExitCode.OK


def _show(wakeups: Wakeups, feed: Feed, terminal: Terminal) -> signal.Signals | None:
    """Draw and listen; returns the signal that ended it."""
    while feed.lost is None:
        silent_s = feed.silent_s
        hint = f"no answer for {silent_s:.0f} s · q quits" if silent_s else "q quits"
        terminal.draw(render(feed.status, *terminal.size, hint))
        numbers, keys = wakeups.wait(REDRAW_S, terminal.keys_fd)
        for number in (signal.SIGINT, *ENDING):
            if number in numbers:
                return number
        if QUIT_KEYS & set(keys):
            return None
        if signal.SIGTSTP in numbers:
            terminal.suspend()
        if signal.SIGWINCH in numbers or REDRAW_KEY in keys:
            terminal.clear()
    return None


def _explain(lost: EnginePoolError, last: PoolStatus) -> EnginePoolError:
    """A pool that was stopping has not been lost by accident."""
    if last.state is not PoolState.DRAINING:
        return lost
    return PoolLost(f"the pool at {last.endpoint} has stopped; it was draining")

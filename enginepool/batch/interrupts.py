"""Signals of a run: the first lets it finish what is in flight, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the signals that ask for the end, for as long as the block lasts, and wakes the run at each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._wake = wake
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` means it
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal has ended."""
        return 128 + (self.first or signal.SIGINT)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)
        self._wake()

"""The start-up stages of a pool's workers: one live line on a terminal, one plain line a stage elsewhere. Always on stderr."""

from __future__ import annotations

import sys

from enginepool.client.progress import is_terminal
from enginepool.clock import monotonic


def shows_loading(progress: bool | None) -> bool:
    """Whether a pool whose `progress` is this shows how far loading is: unless told, where a line can be redrawn."""
    return is_terminal() if progress is None else progress


class LoadingView:
    """Shows the start-up stages of workers."""

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

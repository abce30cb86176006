"""The start-up stages of a pool's workers: live on a terminal or in a notebook, else one plain line a stage. Always on stderr."""

from __future__ import annotations

import sys
from typing import Protocol

from enginepool.client.bars import WORKERS, NotebookBar
from enginepool.client.notebook import is_notebook
from enginepool.client.progress import is_terminal
from enginepool.clock import monotonic

READY = "ready"
NOTEBOOK_TICK_S = 0.5


class LoadingView(Protocol):
    """Shows the start-up stages of workers."""

    tick_s: float | None
    """How often it wants to be ticked, in seconds; None for never."""

    def stage(self, worker: int, text: str) -> None:
        """A worker has reached a stage."""

    def tick(self) -> None:
        """Time has passed."""

    def close(self) -> None:
        """Loading is over, well or not."""


def make_loading_view(progress: bool | None, num_workers: int | None) -> LoadingView:
    """The view that a pool's `progress` asks for: unless told, it shows where it can draw. `num_workers` may be unknown."""
    if progress is None:
        progress = is_notebook() or is_terminal()
    if not progress:
        return _Silent()
    if is_notebook():
        return _Widget(num_workers or 1)
    return _Line() if is_terminal() else _Lines()


class _Silent:
    tick_s: float | None = None

    def stage(self, worker: int, text: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines(_Silent):
    def __init__(self) -> None:
        self._started = monotonic()

    def stage(self, worker: int, text: str) -> None:
        print(f"enginepool: worker {worker}: {text} ({monotonic() - self._started:.1f} s)", file=sys.stderr, flush=True)


class _Line(_Silent):
    def __init__(self) -> None:
        from rich.console import Console

        self._stages: dict[int, str] = {}
        self._status = Console(stderr=True).status("starting workers")
        self._status.start()

    def stage(self, worker: int, text: str) -> None:
        self._stages[worker] = text
        self._status.update(describe_stages(self._stages))

    def close(self) -> None:
        self._status.stop()


class _Widget(_Silent):
    """Counts the ready workers. There may turn out to be more than it was told."""

    tick_s: float | None = NOTEBOOK_TICK_S

    def __init__(self, num_workers: int) -> None:
        self._stages: dict[int, str] = {}
        self._num_workers = num_workers
        self._bar = NotebookBar(num_workers, "starting workers", WORKERS)
        self._bar.open()

    def stage(self, worker: int, text: str) -> None:
        self._stages[worker] = text
        self.tick()

    def tick(self) -> None:
        num_ready = sum(stage == READY for stage in self._stages.values())
        total = max(self._num_workers, len(self._stages))
        self._bar.show(num_ready, describe_stages(self._stages) or "starting", total)

    def close(self) -> None:
        self._bar.close()


def describe_stages(stages: dict[int, str]) -> str:
    """All workers on one line; those at the same stage together."""
    workers: dict[str, list[str]] = {}
    for worker, stage in sorted(stages.items()):
        workers.setdefault(stage, []).append(str(worker))
    return " · ".join(f"worker{'s'[: len(who) > 1]} {', '.join(who)}: {stage}" for stage, who in workers.items())

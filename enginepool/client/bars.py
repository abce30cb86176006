"""The live bars: what draws items, failures and tokens/s where a line can be redrawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar(Protocol):
    """One bar on the screen."""

    def open(self) -> None:
        """Put it there."""

    def draw(self, done: int, failed: int, tokens_per_s: float) -> None:
        """Draw these totals."""

    def close(self) -> None:
        """Leave it as it stands."""


class TerminalBar:
    """A rich bar on stderr."""

    def __init__(self, total: int | None) -> None:
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

    def open(self) -> None:
        """Start the redrawing thread."""
        self._progress.start()

    def draw(self, done: int, failed: int, tokens_per_s: float) -> None:
        """Draw these totals."""
        fails = f"[red]{failed} failed[/] " if failed else ""
        self._progress.update(self._task, completed=done, note=f"{fails}{tokens_per_s:,.0f} tok/s")

    def close(self) -> None:
        """Stop the redrawing thread; the last state stays on the screen."""
        self._progress.stop()

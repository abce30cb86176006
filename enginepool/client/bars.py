"""The live bars: what draws items, failures and tokens/s where a line can be redrawn."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


# What tqdm writes around its bar.
ITEMS = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
UNKNOWN_ITEMS = "{desc}: {n_fmt} [{elapsed}{postfix}]"
WORKERS = "{desc}: {n_fmt}/{total_fmt}|{bar}| {elapsed}{postfix}"
MAY_BREAK = " \u200b"  # tqdm makes spaces unbreakable; in a narrow notebook a long note would be cut off


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


class NotebookBar:
    """A tqdm widget below the cell; tqdm's text bar where ipywidgets is not installed."""

    def __init__(self, total: int | None, label: str = "generating", form: str = ITEMS) -> None:
        self._total = total
        self._label = label
        self._form = form if total else UNKNOWN_ITEMS
        self._bar: Any = None

    def open(self) -> None:
        """Show it."""
        self._bar = _notebook_tqdm()(total=self._total, desc=self._label, bar_format=self._form, dynamic_ncols=True)

    def draw(self, done: int, failed: int, tokens_per_s: float) -> None:
        """Draw these totals."""
        fails = f"{failed} failed, " if failed else ""
        self.show(done, f"{fails}{tokens_per_s:,.0f} tok/s")

    def show(self, done: int, note: str, total: int | None = None) -> None:
        """Draw a count, and a note behind it; a `total` replaces the one before."""
        bar = self._bar
        if total is not None and total != bar.total:
            started = bar.start_t
            bar.reset(total)
            bar.start_t = started
        bar.n = done
        bar.set_postfix_str(note.replace(" ", MAY_BREAK), refresh=False)
        bar.refresh()

    def close(self) -> None:
        """Leave it as it stands; one that is not full turns red."""
        self._bar.close()


def _notebook_tqdm() -> Any:
    """tqdm for an interruptible cell: an interrupt within a redraw leaves tqdm's lock held, so no thread may share it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing ipywidgets: the text bar does as well
        from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no watching thread
        _lock = threading.RLock()

    return Bar

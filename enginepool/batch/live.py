"""Lines at the bottom of a terminal that are drawn again in place, whatever else is printed and however it is resized."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class LiveLines:
    """A region of stderr. What this process prints meanwhile appears above it. It has no thread: it changes when it is drawn."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        # Without these two, the console asks the terminal for its size each time.
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._console = console or Console(stderr=True, _environ=environ)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
        self._drawn: list[int] = []

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows now."""
        return self._console.size

    def start(self) -> None:
        """Begin below what stands there."""
        self._live.start()

    def draw(self, lines: Sequence[Text]) -> None:
        """Show these lines instead of the last ones."""
        from rich.console import Group

        self._erase_wrapped()
        self._drawn = [line.cell_len for line in lines]
        self._live.update(Group(*lines), refresh=True)

    def stop(self) -> None:
        """Leave the last lines as they stand."""
        with suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def _erase_wrapped(self) -> None:
        """A terminal made narrower has wrapped the lines: they take more rows than rich is going to erase."""
        from rich.control import Control
        from rich.segment import ControlType

        width = max(1, self._console.width)
        extra = sum(max(0, length - 1) // width for length in self._drawn)
        if extra:
            erase = (ControlType.ERASE_IN_LINE, 2)
            self._console.control(Control(ControlType.CARRIAGE_RETURN, erase, *[(ControlType.CURSOR_UP, 1), erase] * extra))

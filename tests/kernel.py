"""A notebook on a real IPython kernel, cell by cell, as a front end runs it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import nbformat
import psutil
from conftest import is_alive, wait_for
from nbclient import NotebookClient


class Ran:
    """What one run of a cell has put below it."""

    def __init__(self, outputs: list[Any], widgets: dict[str, Any]) -> None:
        self._outputs = outputs
        self._widgets = widgets

    @property
    def out(self) -> str:
        """What was printed."""
        return self._stream("stdout")

    @property
    def err(self) -> str:
        """What was printed to stderr."""
        return self._stream("stderr")

    @property
    def error(self) -> str | None:
        """The name of the exception it ended with."""
        return next((str(output.ename) for output in self._outputs if output.output_type == "error"), None)

    @property
    def bars(self) -> list[tuple[float, float, str, str]]:
        """tqdm's widgets as they stand: value, maximum, style, and the text around the bar."""
        views = [output.data[VIEW]["model_id"] for output in self._outputs if VIEW in output.get("data", {})]
        return [self._bar(view) for view in views]

    def _bar(self, view: str) -> tuple[float, float, str, str]:
        left, bar, right = (self._widgets[child.removeprefix("IPY_MODEL_")] for child in self._widgets[view]["children"])
        return bar["value"], bar["max"], bar["bar_style"], f"{left['value']}|{right['value']}".replace("\u2007", " ").replace("\u200b", "")

    def _stream(self, name: str) -> str:
        return "".join(output.text for output in self._outputs if output.output_type == "stream" and output.name == name)


VIEW = "application/vnd.jupyter.widget-view+json"


class Notebook:
    """Runs cells; `pid` is the kernel's."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        self._manager = cast(Any, client.km)
        self._session = cast(Any, client.kc).session
        self.pid: int = self._manager.provisioner.pid

    def run(self, source: str, cell_id: str | None = None) -> Ran:
        """Run a cell to its end; `cell_id` is what JupyterLab names it by (others send none)."""
        cell = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]
        self._client.nb.cells.append(cell)
        self._session.metadata = {} if cell_id is None else {"cellId": cell_id}
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return Ran(cell.outputs, self._client.widget_state)

    def value(self, expression: str) -> str:
        """What an expression prints."""
        return self.run(f"print({expression})").out.strip()

    def interrupt_when(self, condition: Callable[[], object], what: str) -> threading.Thread:
        """Start a thread that interrupts the kernel as soon as `condition` holds; the caller joins it."""

        def interrupt() -> None:
            wait_for(condition, what)
            asyncio.run(self._manager.interrupt_kernel())

        thread = threading.Thread(target=interrupt)
        thread.start()
        return thread

    def children(self) -> list[int]:
        """All processes below the kernel."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True) if is_alive(child.pid)]


@contextmanager
def open_notebook() -> Iterator[Notebook]:
    """A new kernel; it is shut down at the end as a front end does it."""
    empty = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    client = NotebookClient(empty, timeout=100, kernel_name="python3", allow_errors=True)
    with client.setup_kernel():
        yield Notebook(client)

"""In a notebook: a re-run cell's old pool is closed before the new one loads. Nothing here imports IPython."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from enginepool.client.cells import Cell, Made, assigned_over, body_of_cell_magic, made_by_last_runs, names_assigned

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
WAKE_S = 0.25

_remembered: list[tuple[weakref.ref[Any], Cell | None, Callable[[Any], bool]]] = []


def is_notebook() -> bool:
    """Whether this program is a kernel of IPython's."""
    return _shell() is not None


def remember(pool: T, give_way: Callable[[T], bool]) -> None:
    """Let a later run of this cell close the pool: `give_way(pool)` closes it at once and tells whether it was open.

    `pool` is what the user holds; it is only referred to weakly, so `give_way` must not hold it either.
    """
    if (shell := _shell()) is not None:
        _remembered[:] = [entry for entry in _remembered if entry[0]() is not None]
        _remembered.append((weakref.ref(pool), _running_cell(shell), give_way))


def replace_old_pools() -> None:
    """Close the pools that the running cell is about to replace, and say so on stderr. Call it before a new pool starts."""
    shell = _shell()
    cell = None if shell is None else _running_cell(shell)
    if shell is None or cell is None:
        return
    pools = [Made(pool, made_in, give_way) for known, made_in, give_way in _remembered if (pool := known()) is not None]
    names = names_assigned(_code_of(shell, cell.source), _running_line(shell.user_ns))
    over = assigned_over(pools, cell, names, shell.user_ns)
    num_rerun = sum(made.give_way(made.pool) for made in made_by_last_runs(pools, cell))
    num_over = sum(made.give_way(made.pool) for made in over)
    if num_rerun or num_over:
        print(f"enginepool: {_describe(num_rerun, num_over)} (worker memory freed before the new one loads)", file=sys.stderr, flush=True)


def keep_awake(loop: asyncio.AbstractEventLoop, is_wanted: Callable[[], bool]) -> None:
    """Let a notebook's event loop turn now and then: the kernel sees an interrupt of an `await` only when its loop turns."""
    if is_notebook() and is_wanted():
        loop.call_later(WAKE_S, keep_awake, loop, is_wanted)


def _describe(num_rerun: int, num_over: int) -> str:
    count, whose = num_rerun + num_over, "of this cell's last run" if num_rerun else "whose name is assigned again"
    return f"the pool {whose} was closed" if count == 1 else f"{count} pools {whose} were closed"


def _shell() -> Any | None:
    """The shell of the kernel that this program is, or None: a terminal's IPython has no kernel."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def _running_cell(shell: Any) -> Cell | None:
    """The cell that runs now; None in a thread of its own or in a widget's callback, which belong to no run of a cell."""
    get_parent = getattr(shell, "get_parent", None)
    request = get_parent() if get_parent is not None else None
    if not request or threading.current_thread() is not threading.main_thread():
        return None
    header = request.get("header", {})
    if header.get("msg_type") != "execute_request":
        return None
    cell_id = request.get("metadata", {}).get("cellId")
    return Cell(str(header.get("msg_id")), None if cell_id is None else str(cell_id), str(request.get("content", {}).get("code")))


def _code_of(shell: Any, source: str) -> str:
    """Python made of a cell's text, as IPython makes it; of a cell with a `%%magic`, what that magic runs."""
    code: str = shell.transform_cell(source)
    body = body_of_cell_magic(code)
    return code if body is None else _code_of(shell, body)


def _running_line(namespace: dict[str, Any]) -> int:
    """The line of the cell that runs now; 0 where none is found."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals is namespace and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno

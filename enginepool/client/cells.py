"""Which of its pools a running notebook cell is about to replace: decided from its source, its identity and the names in use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


class Cell(msgspec.Struct, frozen=True):
    """One run of a cell: `run` names this run alone, `cell_id` the cell where the front end gives it a name."""

    run: str
    cell_id: str | None
    source: str

    def is_rerun_of(self, earlier: Cell) -> bool:
        """Whether both are runs of one cell; without names of the cells, one that reads the same is the same."""
        if self.run == earlier.run:
            return False
        if self.cell_id is not None and earlier.cell_id is not None:
            return self.cell_id == earlier.cell_id
        return self.source == earlier.source


class Made(NamedTuple):
    """A pool, the run of a cell that made it (None: no cell did), and what closes it at once, telling whether it was open."""

    pool: Any
    cell: Cell | None
    give_way: Callable[[Any], bool]


def made_by_last_runs(pools: Iterable[Made], cell: Cell) -> list[Made]:
    """What earlier runs of this cell have made."""
    return [made for made in pools if made.cell is not None and cell.is_rerun_of(made.cell)]


def assigned_over(pools: Iterable[Made], cell: Cell, names: set[str], namespace: Mapping[str, object]) -> list[Made]:
    """What this cell takes the last name of. IPython's own names don't count, pools of this very run are kept."""
    held: dict[int, set[str]] = {}
    for name, value in namespace.items():
        if not name.startswith("_"):  # `_`, `__`, `_12`
            held.setdefault(id(value), set()).add(name)
    others = [made for made in pools if made.cell is None or made.cell.run != cell.run]
    return [made for made in others if held.get(id(made.pool), {""}) <= names]


def names_assigned(code: str, line: int = 0) -> set[str]:
    """Names that a cell binds at its top level at `line` or later, and does not read in between.

    `line` is the one that runs; a pool that is still read before its name is bound again is still in use.
    """
    tree = _parse(code)
    if tree is None:
        return set()
    uses = _Uses(line)
    uses.visit(tree)
    return {
        name
        for name, bound in uses.bound
        if bound >= line and not any(read == name and uses.running_until < where <= bound for read, where in uses.read)
    }


def body_of_cell_magic(code: str) -> str | None:
    """The text below `%%time` and the like, from the code that IPython makes of such a cell; None for another cell."""
    tree = _parse(code)
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        return None
    return _magic_text(tree.body[0].value, "run_cell_magic")


def _parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _magic_text(node: ast.expr, method: str) -> str | None:
    """The last argument of `get_ipython().run_…_magic("time", "", "…")`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method and node.args:
        last = node.args[-1]
        return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else None
    return None


class _Uses(ast.NodeVisitor):
    """Collects what a module's own scope binds and reads, with lines; a simple statement binds at its end."""

    def __init__(self, line: int) -> None:
        self.bound: list[tuple[str, int]] = []
        self.read: list[tuple[str, int]] = []
        self.running_until = line
        self._line = line
        self._binds_at: int | None = None

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _SCOPES):
            return
        if isinstance(node, ast.stmt) and not isinstance(node, _BLOCKS):
            self._visit_simple(node)
        elif isinstance(node, _COMPREHENSIONS):
            self._visit_comprehension(node)
        else:
            super().visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.append((node.id, self._binds_at or node.lineno))
        elif isinstance(node.ctx, ast.Load):
            self.read.append((node.id, node.lineno))

    def _visit_simple(self, node: ast.stmt) -> None:
        end = node.end_lineno or node.lineno
        if node.lineno <= self._line <= end:
            self.running_until = end
        text = _magic_text(node.value, "run_line_magic") if isinstance(node, ast.Expr) else None
        if text is not None:
            self.bound += [(name, end) for name in names_assigned(text)]
        self._binds_at = end
        self.generic_visit(node)
        self._binds_at = None

    def _visit_comprehension(self, node: ast.AST) -> None:
        """Its targets are its own; what it reads may be the module's."""
        names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load))
        self.read += [(name.id, name.lineno) for name in names]

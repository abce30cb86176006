"""Which pools a running cell is about to replace: by the cell's identity, and by the names that it binds again."""

from __future__ import annotations

from typing import Any

import pytest

from enginepool.client.cells import Cell, Made, assigned_over, body_of_cell_magic, made_by_last_runs, names_assigned


def _made(cell: Cell | None) -> Made:
    return Made(object(), cell, lambda pool: True)


@pytest.mark.parametrize(
    ("cell", "earlier", "is_rerun"),
    [
        pytest.param(Cell("2", "a", "x"), Cell("1", "a", "x"), True, id="same-cell"),
        pytest.param(Cell("2", "a", "y"), Cell("1", "a", "x"), True, id="edited-cell"),
        pytest.param(Cell("2", "b", "x"), Cell("1", "a", "x"), False, id="another-cell-that-reads-the-same"),
        pytest.param(Cell("2", None, "x"), Cell("1", None, "x"), True, id="same-source-without-ids"),
        pytest.param(Cell("2", None, "y"), Cell("1", None, "x"), False, id="other-source-without-ids"),
        pytest.param(Cell("2", "a", "x"), Cell("1", None, "x"), True, id="one-id-and-the-same-source"),
        pytest.param(Cell("1", "a", "x"), Cell("1", "a", "x"), False, id="the-same-run"),
    ],
)
def test_cell_is_rerun_of(cell: Cell, earlier: Cell, is_rerun: bool) -> None:
    assert cell.is_rerun_of(earlier) is is_rerun


def test_made_by_last_runs_leaves_this_run_other_cells_and_pools_of_no_cell() -> None:
    first, second = _made(Cell("1", "a", "x")), _made(Cell("2", "a", "x"))
    others = [_made(Cell("3", "a", "x")), _made(Cell("1", "b", "y")), _made(None)]
    assert made_by_last_runs([first, *others, second], Cell("3", "a", "x")) == [first, second]


NOW = Cell("9", None, "now")


@pytest.mark.parametrize(
    ("namespace", "is_replaced"),
    [
        pytest.param({"pool": "POOL"}, True, id="its-name"),
        pytest.param({"pool": "POOL", "other": "POOL"}, True, id="both-its-names"),
        pytest.param({"pool": "POOL", "_": "POOL", "_3": "POOL"}, True, id="ipython-keeps-it-too"),
        pytest.param({"pool": "POOL", "kept": "POOL"}, False, id="another-name-keeps-it"),
        pytest.param({"kept": "POOL"}, False, id="another-name"),
        pytest.param({"_3": "POOL"}, False, id="no-name-of-the-users"),
        pytest.param({"pool": 1}, False, id="its-name-holds-something-else"),
    ],
)
def test_assigned_over_asks_for_the_last_name(namespace: dict[str, Any], is_replaced: bool) -> None:
    made = _made(Cell("1", None, "then"))
    namespace = {name: made.pool if value == "POOL" else value for name, value in namespace.items()}
    assert assigned_over([made], NOW, {"pool", "other"}, namespace) == [made] * is_replaced


def test_assigned_over_leaves_pools_of_this_run() -> None:
    made = _made(NOW)
    assert assigned_over([made], NOW, {"pool"}, {"pool": made.pool}) == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        pytest.param("pool = Pool()", {"pool"}, id="plain"),
        pytest.param("a = b = Pool()", {"a", "b"}, id="chain"),
        pytest.param("a, (b, *c) = make()", {"a", "b", "c"}, id="unpacking"),
        pytest.param("pool: Pool = Pool()", {"pool"}, id="annotated"),
        pytest.param("print(pool := Pool())", {"pool"}, id="walrus"),
        pytest.param("with Pool() as pool:\n    pass", {"pool"}, id="with"),
        pytest.param("async with AsyncPool() as pool:\n    await pool.generate('x')", {"pool"}, id="async-with"),
        pytest.param("try:\n    pool = Pool()\nfinally:\n    pass", {"pool"}, id="in-a-block"),
        pytest.param("def make():\n    pool = Pool()\n    return pool\nother = make()", {"other"}, id="not-in-a-function"),
        pytest.param("class C:\n    pool = Pool()", set(), id="not-in-a-class"),
        pytest.param("[pool for pool in pools]", set(), id="not-in-a-comprehension"),
        pytest.param("a.pool = b['pool'] = Pool()", set(), id="not-an-attribute"),
        pytest.param("get_ipython().run_line_magic('time', 'pool = Pool()')", {"pool"}, id="line-magic"),
        pytest.param("get_ipython().run_line_magic('time', name)", set(), id="line-magic-of-a-variable"),
        pytest.param("pool = (", set(), id="not-python"),
        pytest.param("pool = '\0'", set(), id="null-byte"),
        pytest.param("", set(), id="empty"),
    ],
)
def test_names_assigned(code: str, names: set[str]) -> None:
    assert names_assigned(code) == names


@pytest.mark.parametrize(
    ("code", "line", "names"),
    [
        pytest.param("pool = Pool()\nuse(pool)", 1, {"pool"}, id="used-afterwards"),
        pytest.param("print(pool)\npool = Pool()", 2, {"pool"}, id="used-before"),
        pytest.param("pool = Pool()\nother = Pool()", 2, {"other"}, id="bound-before"),
        pytest.param("new = Pool()\nuse(pool)\npool = new", 1, {"new"}, id="still-used-before-it-is-bound"),
        pytest.param("new = Pool()\npool = new", 1, {"new", "pool"}, id="bound-later"),
        pytest.param("pool = Pool(\n    pool.model,\n)", 1, {"pool"}, id="read-by-the-running-statement"),
        pytest.param("pool = Pool(\n    pool.model,\n)", 2, {"pool"}, id="inside-the-running-statement"),
        pytest.param("for m in models:\n    pool = Pool(m)\n    use(pool)", 2, {"pool"}, id="loop"),
        pytest.param("for m in models:\n    new = Pool(m)\n    use(pool)\n    pool = new", 2, {"new"}, id="loop-that-uses-the-old-one"),
        pytest.param("x = [use(pool)\n  for _ in range(3)]\npool = Pool()", 3, {"pool"}, id="comprehension-before"),
        pytest.param("new = Pool()\nx = [use(pool) for _ in y]\npool = new", 1, {"new", "x"}, id="comprehension-between"),
        pytest.param("def f():\n    return pool\nnew = Pool()\npool = new", 3, {"new", "pool"}, id="functions-are-not-read"),
    ],
)
def test_names_assigned_from_the_running_line(code: str, line: int, names: set[str]) -> None:
    assert names_assigned(code, line) == names


@pytest.mark.parametrize(
    ("code", "body"),
    [
        pytest.param("get_ipython().run_cell_magic('time', '', 'pool = Pool()\\n')\n", "pool = Pool()\n", id="time"),
        pytest.param("pool = Pool()\n", None, id="plain"),
        pytest.param("get_ipython().run_line_magic('time', 'pool = Pool()')\n", None, id="line-magic"),
        pytest.param("x = (", None, id="not-python"),
    ],
)
def test_body_of_cell_magic(code: str, body: str | None) -> None:
    assert body_of_cell_magic(code) == body

"""Notebooks on a real kernel: a re-run cell replaces its pool, progress is a bar, an interrupted cell leaves a usable pool."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from conftest import REPO, is_alive, wait_for
from kernel import Notebook, open_notebook

from enginepool import Pool

PREPARE = """
import os, signal, subprocess, threading
import psutil
from enginepool import AsyncPool, Pool, SamplingParams
from enginepool.client.notebook import remember, replace_old_pools

known_pids, alive_at_start = [], []

def tree(pool):
    return [pool.status().pid, *(worker.pid for worker in pool.status().workers)]

def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

class WatchedPopen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        alive_at_start.append([pid for pid in known_pids if is_alive(pid)])
        super().__init__(*args, **kwargs)

subprocess.Popen = WatchedPopen

class Light:
    made = []  # holds them as a global variable out of sight would

    def __init__(self):
        replace_old_pools()
        self.is_open = True
        Light.made.append(self)
        remember(self, Light.give_way)

    def give_way(self):
        was_open, self.is_open = self.is_open, False
        return was_open

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.give_way()
"""
CLOSED = "enginepool: the pool of this cell's last run was closed (worker memory freed before the new one loads)\n"
TWO_CLOSED = CLOSED.replace("the pool", "2 pools").replace("was", "were")
ASSIGNED = "enginepool: the pool whose name is assigned again was closed (worker memory freed before the new one loads)\n"
PLAIN = 'pool = Pool(engine="echo", workers=1)'


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """One kernel for the module: starting one takes a second or two."""
    with open_notebook() as notebook:
        assert notebook.run(PREPARE).error is None
        yield notebook


@pytest.fixture(scope="module")
def watcher(notebook: Notebook) -> Iterator[Pool]:
    """What the test process sees of a pool that lives in the kernel under the name `busy`."""
    assert notebook.run('busy = Pool(engine="echo", workers=1, step_s=0.001)').error is None
    with Pool.connect(notebook.value("busy.endpoint")) as watcher:
        yield watcher


# A re-run cell.


def test_rerun_cell_ends_its_pool_before_the_new_one_starts(notebook: Notebook) -> None:
    assert notebook.run(PLAIN).err == ""
    notebook.run("known_pids += tree(pool); future = pool.submit('x', SamplingParams(extra_args={'fault': 'hang', 'at': 1}))")
    assert notebook.run(PLAIN).err == CLOSED
    assert notebook.value("alive_at_start, len(known_pids)") == "[[], []] 2"
    assert notebook.value("type(future.exception(timeout=0)).__name__, pool.generate('new', {'max_tokens': 3}).text") == "PoolClosed new"
    notebook.run("known_pids += tree(pool)")
    assert notebook.run("%%time\npool = Pool(engine='echo', workers=2)").err == ASSIGNED
    assert notebook.value("alive_at_start, len(known_pids)") == "[[], [], []] 4"
    assert notebook.run("pool.close()").err == ""


def test_rerun_cell_of_an_async_pool_ends_it_before_the_new_one_starts(notebook: Notebook) -> None:
    cell = "pool = await AsyncPool(engine='echo', workers=1)"
    notebook.run("known_pids.clear(); alive_at_start.clear()")
    notebook.run(cell)
    notebook.run("status = await pool.status(); known_pids += [status.pid, *(worker.pid for worker in status.workers)]")
    assert notebook.run(cell).err == CLOSED
    assert notebook.value("alive_at_start") == "[[], []]"
    assert notebook.value("(await pool.generate('new', {'max_tokens': 3})).text") == "new"
    assert notebook.run("await pool.close()").err == ""


def test_cell_with_a_refused_setting_keeps_the_old_pool(notebook: Notebook, watcher: Pool) -> None:
    ran = notebook.run("busy = Pool(engine='echo', worker=1)")
    assert (ran.error, ran.err) == ("SettingsError", "")
    assert notebook.value("busy.generate('hello', {'max_tokens': 5}).text") == "hello"


@pytest.mark.parametrize(
    ("first", "second", "cell_id", "told"),
    [
        pytest.param("pool = Light()", "pool = Light()", None, CLOSED, id="same-cell"),
        pytest.param("pool = Light()", "pool = Light()", "c1", CLOSED, id="same-named-cell"),
        pytest.param("pool = Light()", "pool = Light()  # edited", None, ASSIGNED, id="edited"),
        pytest.param("pool = Light()", "other = Light()", "c2", CLOSED, id="edited-and-renamed-in-a-named-cell"),
        pytest.param("pools = [Light()]", "pools = [Light()]", None, CLOSED, id="in-a-list"),
        pytest.param("pools = [Light(), Light()]", "pools = [Light(), Light()]", None, TWO_CLOSED, id="two"),
        pytest.param("%%time\npool = Light()", "%%time\npool = Light()  # edited", None, ASSIGNED, id="below-a-magic"),
        pytest.param("%time pool = Light()", "%time pool = Light()  # edited", None, ASSIGNED, id="behind-a-magic"),
        pytest.param("pool = Light(); 1 / 0", "pool = Light(); 1 / 0", None, CLOSED, id="held-by-a-traceback"),
        pytest.param("Light()", "Light()", None, CLOSED, id="held-by-Out"),
        pytest.param(
            "import asyncio; await asyncio.sleep(0); pool = Light()", "pool = Light(); await asyncio.sleep(0)", None, ASSIGNED, id="await"
        ),
        pytest.param("with Light() as pool:\n    pass", "pool = Light()", None, "", id="closed-already"),
    ],
)
def test_cell_replaces_its_pool_however_it_is_held(notebook: Notebook, first: str, second: str, cell_id: str | None, told: str) -> None:
    notebook.run("Light.made.clear()")
    notebook.run(first, cell_id)
    num_made = int(notebook.value("len(Light.made)"))
    assert notebook.run(second, cell_id).err == told
    assert notebook.value("[pool.is_open for pool in Light.made]") == str([False] * num_made + [True] * num_made)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("", "first = Light(); second = Light()", id="two-of-one-run"),
        pytest.param("", "pools = [Light() for _ in range(2)]", id="a-list-of-one-run"),
        pytest.param("", "for _ in range(2):\n    pool = Light()", id="a-loop-of-one-run"),
        pytest.param("first = Light()", "second = Light()", id="another-cell-another-name"),
        pytest.param("pool = kept = Light()", "pool = second = Light()", id="kept-by-another-name"),
        pytest.param("pool = Light()", "second = Light()\nassert pool.is_open\npool = second", id="still-in-use"),
        pytest.param(
            "pool = Light()",
            "def make():\n    Light()\nt = threading.Thread(target=make); t.start(); t.join(); pool = 1",
            id="made-by-a-thread",
        ),
    ],
)
def test_cell_leaves_pools_that_it_does_not_replace(notebook: Notebook, first: str, second: str) -> None:
    notebook.run("Light.made.clear(); pool = first = second = kept = None")
    notebook.run(first, f"first of {second}")
    ran = notebook.run(second, f"second of {second}")
    assert (ran.err, ran.error) == ("", None)
    assert notebook.value("[pool.is_open for pool in Light.made]") == "[True, True]"


def test_cell_leaves_the_pool_of_another_cell_that_reads_the_same(notebook: Notebook) -> None:
    notebook.run("Light.made.clear()")
    for cell_id in ("c5", "c6"):
        assert notebook.run("Light.made[-1:] + [Light()]", cell_id).err == ""
    assert notebook.value("[pool.is_open for pool in Light.made]") == "[True, True]"


# Progress.


def test_loading_and_generating_show_full_bars(notebook: Notebook) -> None:
    [(value, maximum, style, text)] = notebook.run('pool = Pool(engine="echo", workers=2)').bars
    assert (value, maximum, style) == (2, 2, "success")
    assert text.startswith("starting workers: 2/2| 00:0")
    assert "workers 0, 1: ready" in text
    ran = notebook.run("outputs = pool.generate_many(['item'] * 20 + [''], SamplingParams(max_tokens=5), progress=True); pool.close()")
    [(value, maximum, style, text)] = ran.bars
    assert (value, maximum, style) == (21, 21, "success")
    assert text.startswith("generating: 100%| 21/21 [00:0")
    assert "1 failed, " in text
    assert "tok/s]" in text


def test_bars_are_not_shown_where_they_are_not_wanted(notebook: Notebook) -> None:
    assert notebook.run('with Pool(engine="echo", workers=1, progress=False) as pool: pool.generate_many(["item"])').bars == []


def test_bar_of_an_unknown_number_of_items_counts_them(notebook: Notebook) -> None:
    ran = notebook.run("from enginepool.client.progress import make_view\nwith make_view(None, True) as view:\n    view.update(7, 1, 70)")
    [(_, _, style, text)] = ran.bars
    assert style == "success"
    assert text.startswith("|generating: 7 [00:0")
    assert "1 failed" in text


def test_bar_is_text_where_ipywidgets_is_missing() -> None:
    with open_notebook() as notebook:
        ran = notebook.run("import sys; sys.modules['ipywidgets'] = None\nfrom enginepool import Pool\n" + PLAIN)
        assert ran.error is None
        assert ran.bars == []
        assert "starting workers: 1/1|" in ran.err
        assert "Warning" not in ran.err


# Interrupts.


@pytest.mark.parametrize("call", ["busy.generate_many(['old'] * 40, endless, progress=True)", "busy.generate('old', endless)"])
def test_interrupted_call_leaves_a_usable_pool_and_no_old_result(notebook: Notebook, watcher: Pool, call: str) -> None:
    interrupter = notebook.interrupt_when(lambda: watcher.status().in_flight > 0, "the call to run")
    ran = notebook.run(f"endless = SamplingParams(max_tokens=10_000_000)\n{call}")
    interrupter.join()
    assert ran.error == "KeyboardInterrupt"
    assert [bar[:3] for bar in ran.bars] == ([(0, 40, "danger")] if "many" in call else [])
    texts = "*(o.text for o in busy.generate_many([f'new {index:02}' for index in range(40)], {'max_tokens': 6}))"
    assert notebook.value(texts).split() == " ".join(f"new {index:02}" for index in range(40)).split()
    wait_for(lambda: watcher.status().in_flight == 0, "the abort of the old items")


def test_interrupted_await_leaves_a_usable_pool(notebook: Notebook) -> None:
    notebook.run("apool = await AsyncPool(engine='echo', workers=1, step_s=0.001)")
    with Pool.connect(notebook.value("apool.endpoint")) as watcher:
        interrupter = notebook.interrupt_when(lambda: watcher.status().in_flight > 0, "the call to run")
        assert notebook.run("await apool.generate('old', SamplingParams(max_tokens=10_000_000))").error == "CancelledError"
        interrupter.join()
        wait_for(lambda: watcher.status().in_flight == 0, "the abort of the old item")
    assert notebook.value("(await apool.generate('new', {'max_tokens': 3})).text") == "new"
    assert notebook.run("await apool.close()").error is None


def test_interrupted_status_leaves_a_usable_pool(notebook: Notebook, watcher: Pool) -> None:
    dispatcher = psutil.Process(watcher.status().pid)
    interrupter = notebook.interrupt_when(lambda: dispatcher.status() == psutil.STATUS_STOPPED, "the dispatcher's stop")
    ran = notebook.run(f"os.kill({dispatcher.pid}, signal.SIGSTOP)\nbusy.status()")
    interrupter.join()
    dispatcher.send_signal(signal.SIGCONT)
    assert ran.error == "KeyboardInterrupt"
    assert notebook.value("busy.status().state.value, busy.generate('hello', {'max_tokens': 5}).text") == "ready hello"


def test_interrupted_loading_leaves_no_process(notebook: Notebook) -> None:
    before = set(notebook.children())
    interrupter = notebook.interrupt_when(lambda: len(set(notebook.children()) - before) >= 2, "a dispatcher with a worker")
    ran = notebook.run('pool = Pool(engine="echo", workers=1, start_s=60)')
    interrupter.join()
    assert ran.error == "KeyboardInterrupt"
    assert [bar[:3] for bar in ran.bars] == [(0, 1, "danger")]
    assert set(notebook.children()) <= before
    assert notebook.run(PLAIN + "; print(pool.generate('hello', {'max_tokens': 5}).text); pool.close()").out == "hello\n"


# The kernel's end.


@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_end_of_the_kernel_leaves_nothing(end: str) -> None:
    with open_notebook() as notebook:
        notebook.run("from enginepool import Pool\n" + PLAIN)
        left = notebook.children()
        assert len(left) >= 2
        if end == "kill":
            os.kill(notebook.pid, signal.SIGKILL)
            wait_for(lambda: not [pid for pid in left if is_alive(pid)], "the end of dispatcher and worker", 5)
    wait_for(lambda: not [pid for pid in left if is_alive(pid)], "the end of dispatcher and worker", 5)


# The example.


def _cells_of_the_example() -> list[tuple[str, bool]]:
    """Source of each code cell, and whether it is the one with the parameters."""
    cells = json.loads((REPO / "docs" / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), "parameters" in cell["metadata"].get("tags", [])) for cell in code]


def test_example_notebook_runs_on_the_echo_engine(notebook: Notebook) -> None:
    parameters = [is_parameters for _, is_parameters in _cells_of_the_example()]
    assert parameters.count(True) == 1
    printed = []
    for source, is_parameters in _cells_of_the_example():
        ran = notebook.run("SETTINGS = {'engine': 'echo'}" if is_parameters else source)
        assert (ran.error, ran.err) == (None, "")
        printed.append(ran.out)
    assert "".join(printed).splitlines()[-1] == "ready with 1 worker; 24 items ended, 0 failed"


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_example_notebook_runs_as_it_stands(notebook: Notebook) -> None:
    for source, _ in _cells_of_the_example():
        assert notebook.run(source).error is None


# A real engine.


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_cell_run_twice_ends_its_pool_before_the_new_one_starts_and_answers(notebook: Notebook) -> None:
    cell = "pool = Pool(workers=1, max_model_len=256, max_num_seqs=4, enforce_eager=True, kv_cache_budget_bytes=256 << 20)"
    notebook.run("known_pids.clear(); alive_at_start.clear()")
    first = notebook.run(cell)
    notebook.run("known_pids += [child.pid for child in psutil.Process(pool.status().pid).children(recursive=True)]")
    second = notebook.run(cell)
    assert (first.err, second.err) == ("", CLOSED)
    assert [bar[:3] for ran in (first, second) for bar in ran.bars] == [(1, 1, "success")] * 2
    assert notebook.value("alive_at_start") == "[[], []]"
    answer = notebook.run("print(pool.generate('The capital of France is', {'max_tokens': 8, 'temperature': 0}).text)")
    assert "Paris" in answer.out
    assert notebook.run("pool.close()").err == ""

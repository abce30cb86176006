"""Nothing that comes over a wire or out of a file is ever run or unpickled: neither in our code nor, underneath it, in what we import."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import REPO

from enginepool.make_keys import make_keys

LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "copyreg", "dbm"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "torch.load",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
    "runpy.run_path",
    "runpy.run_module",
}
# These unpickle, too: messages of multiprocessing's connections and queues, objects in ZeroMQ messages, logging over sockets.
CARRIERS = {"multiprocessing.connection", "multiprocessing.managers", "multiprocessing.queues", "multiprocessing.shared_memory"}
CARRYING = {"recv_pyobj", "send_pyobj", "ProcessPoolExecutor", "SocketHandler", "BaseManager", "SyncManager"}

# A benchmark talks to processes that it has started itself, over a socket pair that nobody else has; an example and a benchmark
# use executors of the standard library, which pickle what the user's own program hands them.
OWN_PROCESSES = {"bench/child.py", "bench/raw_engine.py", "bench/raw_hop.py", "bench/timed_engine.py"}
EXECUTORS = {"bench/dispatch.py", "docs/examples/shared_pool.py"}

TRAP = """
import os, pickle, sys, _pickle
with open(os.environ["TRAP_SEEN"], "a") as file:
    file.write(" ".join(sys.orig_argv) + chr(10))
def trap(*args, **kwargs):
    with open(os.environ["TRAP_SPRUNG"], "a") as file:
        import traceback
        traceback.print_stack(file=file)
    raise RuntimeError("something was unpickled")
class Unpickler:
    __init__ = trap
for module in (pickle, _pickle):
    for name in ("load", "loads", "_load", "_loads"):
        setattr(module, name, trap)
    module.Unpickler = module._Unpickler = Unpickler
"""
DRIVE = """
import sys
from enginepool import Pool, SamplingParams
settings = dict(endpoint="tcp://127.0.0.1:0", keys=sys.argv[1]) if len(sys.argv) > 1 else {}
FIVE = SamplingParams(max_tokens=5)
with Pool(engine="echo", workers=2, step_s=0.001, **settings) as pool:
    assert pool.generate("hello", FIVE).text == "hello"
    assert all(output.ok for output in pool.generate_many([f"prompt {number}" for number in range(50)], FIVE))
    assert sum(output.ok for _, output in pool.iter_many((f"prompt {number}" for number in range(50)), FIVE)) == 50
    with pool.stream("hello", FIVE) as stream:
        assert "".join(delta.text for delta in stream) == "hello"
    assert pool.chat([{"role": "user", "content": "hi"}], FIVE).ok
    assert not pool.generate("", FIVE).ok
    future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
    assert pool.status().workers
    future.cancel()
with Pool(engine="echo", workers=1, **settings) as pool:
    from enginepool.client.control import drain
    assert drain(pool.endpoint, settings.get("keys"), 5.0) == 0
    pool.close(drain=False)
print("driven")
"""


def _sources() -> list[Path]:
    return [path for folder in ("enginepool", "bench", "docs") for path in sorted((REPO / folder).rglob("*.py"))]


@cache
def _dangers(path: Path) -> frozenset[str]:
    return frozenset(_dangers_in(ast.parse(path.read_text(encoding="utf-8"))))


def _dangers_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from _dangerous_modules(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _dangerous_modules([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
            yield from (alias.name for alias in node.names if alias.name in CARRYING)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in RUNNERS | METHODS or name.rpartition(".")[2] in CARRYING:
                yield name
            yield from (keyword.arg for keyword in node.keywords if keyword.arg == "allow_pickle")


def _dangerous_modules(names: Iterator[str] | list[str]) -> Iterator[str]:
    yield from (name for name in names if name.partition(".")[0] in LOADERS or name in CARRIERS)


def _names(paths: list[Path]) -> set[str]:
    return {path.relative_to(REPO).as_posix() for path in paths}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "def later():\n    import dill as d",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "torch.load(path)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "socket.recv_pyobj()",
        "from multiprocessing.connection import Client",
        "from multiprocessing import managers",
        "from concurrent.futures import ProcessPoolExecutor",
        "__import__(name)",
    ],
)
def test_danger_is_found(code: str) -> None:
    assert list(_dangers_in(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "re.compile(text)", "json.load(file)", "'import pickle'", "loop.exec(5)", "import copy"])
def test_harmless_code_is_let_be(code: str) -> None:
    assert not list(_dangers_in(ast.parse(code)))


def test_package_neither_unpickles_nor_runs_what_it_reads() -> None:
    found = {path: _dangers(path) for path in _sources() if _dangers(path)}
    assert _names(list(found)) == OWN_PROCESSES | EXECUTORS
    assert {danger for path in found if path.parts[-2] == "bench" for danger in _dangers(path)} <= {
        "multiprocessing.connection",
        "multiprocessing.connection.Connection",
        "ProcessPoolExecutor",
    }


@pytest.mark.parametrize("transport", ["ipc", "tcp-with-keys"])
def test_client_dispatcher_and_worker_unpickle_nothing(tmp_path: Path, transport: str) -> None:
    """Every way to unpickle is a trap in all three, and all that a pool can be asked for is asked."""
    (tmp_path / "sitecustomize.py").write_text(TRAP)
    seen, sprung = tmp_path / "seen", tmp_path / "sprung"
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    env = os.environ | {"PYTHONPATH": path, "TRAP_SEEN": str(seen), "TRAP_SPRUNG": str(sprung)}
    check = subprocess.run([sys.executable, "-c", "import pickle; pickle.loads(b'N.')"], env=env, capture_output=True, text=True)
    assert "something was unpickled" in check.stderr
    sprung.unlink()
    arguments = [] if transport == "ipc" else [str(make_keys(tmp_path / "keys")[0])]
    done = subprocess.run([sys.executable, "-c", DRIVE, *arguments], env=env, capture_output=True, text=True, timeout=90)
    assert done.stdout == "driven\n", done.stderr
    assert not sprung.exists(), sprung.read_text()
    processes = seen.read_text()
    assert "-m enginepool serve" in processes
    assert "-m enginepool.worker.main" in processes

"""Who may import whom: one-way from errors to cli, heavy libraries in their own process only, deciding apart from doing."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import enginepool

ROOT = Path(enginepool.__file__).parent
LADDER = [
    {"errors", "lifeline", "pinpoint"},
    {"config", "clock", "status", "sampling", "payload", "protocol", "handover", "recorder", "rundir", "chat_format", "presence"}
    | {"endpoint", "keys", "locks", "sweep", "trace_event", "trace_file"},
    {"transport", "curve"},
    {"client", "dispatcher", "worker"},
    {"__init__", "preflight", "serve", "demo", "batch", "gateway", "integrations", "doctor", "make_keys"},
    {"cli"},
    {"__main__"},
]
RANKS = {part: rank for rank, parts in enumerate(LADDER) for part in parts}
PLACEMENT = ["placement", "affinity", "cpuset", "devices", "environment", "kv_budget", "plan", "spread"]
PURE = [
    f"dispatcher.{name}" for name in ("backlog", "leases", "suspects", "desk", "assign", "roster", "vigil", "latency", "trace", *PLACEMENT)
]
PURE += ["presence", "client.pulse", "client.far_clock", "trace_event"]
PURE += [f"batch.{name}" for name in ("histogram", "buckets", "lanes", "sample", "tally", "charts", "timeline", "pace", "trace_lanes")]
DOING = {"os", "time", "socket", "subprocess", "zmq", "threading", "multiprocessing", "selectors", "signal", "asyncio", "random"}
DOING_OF_OURS = ("transport", "rundir", "handover", "clock")
HEAVY = {"vllm", "torch", "transformers", "numpy"}


def _names() -> list[str]:
    """All modules below enginepool, as `client.pool`; a package by its `__init__`."""
    return sorted(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in ROOT.rglob("*.py"))


def _is_module(name: str) -> bool:
    return (ROOT / (name.replace(".", "/") + ".py")).exists()


def _resolve(module: str, name: str | None) -> str:
    """The module behind `from module import name`, or `import module`; ours without the leading `enginepool.`."""
    if module.partition(".")[0] != "enginepool":
        return module
    inner = module.removeprefix("enginepool").lstrip(".")
    candidates = [f"{inner}.{name}".lstrip("."), inner, f"{inner}.__init__".lstrip(".")]
    return "enginepool." + next(candidate for candidate in candidates if candidate and _is_module(candidate))


@cache
def _imports(name: str) -> frozenset[str]:
    """What a module imports, in functions and for type checking too."""
    tree = ast.parse((ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {_resolve(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            found |= {_resolve(node.module, alias.name) for alias in node.names}
    return frozenset(found)


def _ours(name: str) -> set[str]:
    return {target.removeprefix("enginepool.") for target in _imports(name) if target.startswith("enginepool.")}


def _foreign(name: str) -> set[str]:
    return {target.partition(".")[0] for target in _imports(name)} - {"enginepool"}


def _importers(*libraries: str) -> set[str]:
    return {name for name in _names() if _foreign(name) & set(libraries)}


def _part(name: str) -> str:
    return name.partition(".")[0]


def test_every_part_has_a_place_on_the_ladder() -> None:
    assert {_part(name) for name in _names()} <= RANKS.keys()


def test_imports_go_down_the_ladder() -> None:
    climbs = [
        f"{name} imports {target}"
        for name in _names()
        for target in _ours(name)
        if _part(target) != _part(name) and RANKS[_part(target)] > RANKS[_part(name)]
    ]
    assert climbs == []


def test_client_dispatcher_and_worker_do_not_know_each_other() -> None:
    processes = LADDER[3]
    crossings = [
        f"{name} imports {target}"
        for name in _names()
        for target in _ours(name)
        if {_part(name), _part(target)} <= processes and _part(name) != _part(target)
    ]
    assert crossings == []


def test_imports_have_no_cycle() -> None:
    order = TopologicalSorter({name: _ours(name) for name in _names() if name != "__init__"})
    assert list(order.static_order())


def test_heavy_libraries_stay_in_their_own_process() -> None:
    parts = ("engine", "args", "chat", "grammar", "stats", "results", "openai", "serving")
    worker = {f"worker.vllm_{part}" for part in parts}
    assert _importers(*HEAVY) <= worker | {"demo.convert"}


def test_chat_renderer_needs_vllm_for_type_checking_only() -> None:
    code = "import sys, enginepool.worker.vllm_chat; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert HEAVY & set(loaded) == set()


def test_sockets_are_made_in_one_place() -> None:
    assert _importers("zmq") == {"transport", "curve"}
    assert _importers("socket") == set()


def test_processes_are_started_in_few_places() -> None:
    starters = _importers("subprocess")
    assert {name for name in starters if _part(name) != "demo"} == {"dispatcher.supervisor", "client.child"}


def test_nothing_is_pickled() -> None:
    assert _importers("pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib") == set()


def test_dispatcher_does_not_read_payloads() -> None:
    assert [name for name in _names() if _part(name) == "dispatcher" and "payload" in _ours(name)] == []


@pytest.mark.parametrize("name", PURE)
def test_pure_module_only_decides(name: str) -> None:
    assert _foreign(name) & DOING == set()
    assert _ours(name) & set(DOING_OF_OURS) == set()


def test_dispatcher_process_stays_light() -> None:
    code = "import sys, enginepool.serve, enginepool.dispatcher.loop; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert {"enginepool.dispatcher.loop", "enginepool.serve"} <= set(loaded)
    assert (HEAVY | {"enginepool.payload", "asyncio", "rich", "jinja2", "tqdm"}) & set(loaded) == set()


def test_import_of_the_package_loads_none_of_its_parts() -> None:
    code = "import sys, enginepool; print(*[name for name in sys.modules if name.startswith('enginepool.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split() == []


def test_public_names_are_those_that_can_be_imported() -> None:
    assert sorted(name for names in enginepool._HOMES.values() for name in names) == sorted(enginepool.__all__)
    assert all(getattr(enginepool, name) is not None for name in enginepool.__all__)

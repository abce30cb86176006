"""Whoever is killed, in whatever state, takes all below it along, and the next start finds nothing in its way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve, Served, tree_of, wait_for, wait_for_end, worker_pids
from leftovers import FAMILY_SIZE, Place
from surroundings import customized

from enginepool import Pool, PoolState, SamplingParams, WorkerState, lifeline
from enginepool.errors import ExitCode

ENDLESS = SamplingParams(max_tokens=10_000_000)
Situation = Callable[[Served, Place], AbstractContextManager[None]]
SITUATIONS: dict[str, tuple[Situation, dict[str, Any]]] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One place for the whole module: each start there is the next one after a violent end. The last ends well and leaves no file."""
    place = Place(tmp_path_factory.mktemp("place"))
    yield place
    last = start(Served, place)
    last.ready_line()
    last.process.terminate()
    assert last.finish()[0] == ExitCode.OK
    place.wait_until_empty()


@pytest.fixture(autouse=True, scope="module")
def bystander() -> Iterator[None]:
    """A program of the same shell, group and session as each dispatcher; whatever is done here, it lives."""
    program = subprocess.Popen(["sleep", "600"])
    yield
    assert program.poll() is None
    program.kill()
    program.wait()


def start(serve: Serve, place: Place, *arguments: str, **engine_args: Any) -> Served:
    """Two echo workers at the default endpoint of the place."""
    config = place.temp.parent / "pool.toml"
    config.write_text("[engine_args]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in engine_args.items()))
    return serve("--engine", "echo", "--workers", "2", "--config", str(config), *arguments, env=place.environment)


def situation(**engine_args: Any) -> Callable[[Callable[[Served, Place], Iterator[None]]], None]:
    """What the pool is doing when its dispatcher is killed."""

    def register(bring_about: Callable[[Served, Place], Iterator[None]]) -> None:
        SITUATIONS[bring_about.__name__.strip("_").replace("_", " ")] = contextmanager(bring_about), engine_args

    return register


@situation()
def _idle(served: Served, place: Place) -> Iterator[None]:
    line = json.loads(served.ready_line())
    assert (line["endpoint"], line["state"]) == (place.endpoint, "ready")
    yield


@situation(hang_start=[0, 1])
def _loading(served: Served, place: Place) -> Iterator[None]:
    wait_for(lambda: len(tree_of(served.pid)) == 1 + 2 * FAMILY_SIZE, "the workers with their families")
    yield


@situation(hang_start=[1])
def _one_ready_one_loading(served: Served, place: Place) -> Iterator[None]:
    wait_for(lambda: len(tree_of(served.pid)) == 1 + 2 * FAMILY_SIZE, "the workers with their families")
    with Pool.connect(place.endpoint) as pool:
        wait_for(lambda: pool.status().workers[0].state is WorkerState.READY, "the first worker")
    yield


@situation(step_s=0.002)
def _generating(served: Served, place: Place) -> Iterator[None]:
    with _busy(served, place):
        yield


@situation(step_s=0.002)
def _one_worker_stopped(served: Served, place: Place) -> Iterator[None]:
    with _busy(served, place) as pool:
        os.kill(worker_pids(pool)[0], signal.SIGSTOP)
        yield


@situation(step_s=0.002)
def _everything_stopped(served: Served, place: Place) -> Iterator[None]:
    with _busy(served, place) as pool:
        for pid in worker_pids(pool):
            os.killpg(pid, signal.SIGSTOP)
        os.kill(served.pid, signal.SIGSTOP)
        yield


@situation(step_s=0.002)
def _draining(served: Served, place: Place) -> Iterator[None]:
    with _busy(served, place) as pool:
        served.process.terminate()
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        yield


@situation(hang_close=True)
def _waiting_for_workers_that_shut_down(served: Served, place: Place) -> Iterator[None]:
    served.ready_line()
    with Pool.connect(place.endpoint) as pool:
        served.process.terminate()
        wait_for(lambda: all(worker.state is WorkerState.DRAINING for worker in pool.status().workers), "the shutdown")
        yield


@situation(start_s=0.5)
def _starting_a_worker_again(served: Served, place: Place) -> Iterator[None]:
    served.ready_line()
    with Pool.connect(place.endpoint) as pool:
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        wait_for(lambda: pool.status().workers[0].restarts == 1, "the restart")
        yield


@situation()
def _a_worker_dies_at_the_same_moment(served: Served, place: Place) -> Iterator[None]:
    served.ready_line()
    with Pool.connect(place.endpoint) as pool:
        victims = worker_pids(pool)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    yield


@contextmanager
def _busy(served: Served, place: Place) -> Iterator[Pool]:
    """A pool in which both workers generate."""
    served.ready_line()
    with Pool.connect(place.endpoint) as pool:
        for _ in range(4):
            pool.submit("endless", ENDLESS)
        wait_for(lambda: all(worker.in_flight for worker in pool.status().workers), "work in both hands")
        yield pool
        pool.close(drain=False)


@pytest.mark.parametrize("name", SITUATIONS)
def test_killed_dispatcher_leaves_nobody(serve: Serve, place: Place, name: str) -> None:
    bring_about, engine_args = SITUATIONS[name]
    served = start(serve, place, **engine_args)
    with bring_about(served, place):
        assert len(place.processes()) > 3
        os.kill(served.pid, signal.SIGKILL)
        place.wait_until_deserted()
    served.finish()


@pytest.mark.parametrize("seed", range(6))
def test_dispatcher_killed_at_a_random_moment_of_its_start_leaves_nobody(serve: Serve, place: Place, seed: int) -> None:
    served = start(serve, place, start_s=0.1)
    threading.Event().wait(random.Random(seed).uniform(0.1, 0.9))  # the moment of the fault, not a condition
    os.kill(served.pid, signal.SIGKILL)
    place.wait_until_deserted()
    served.finish()


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        pytest.param("lifeline.signal_at_end = lambda *_: None", "signal_at_end", id="parent-death signal alone"),
        pytest.param("lifeline.arm = lambda *_: None", "arm", id="group tie alone"),
    ],
)
def test_workers_end_with_their_dispatcher_by_either_tie(serve: Serve, tmp_path: Path, broken: str, name: str) -> None:
    """Where a kernel or a sandbox lacks one of the two, the other still holds."""
    assert hasattr(lifeline, name)
    served = serve("--engine", "echo", "--workers", "2", env=customized(tmp_path, everywhere=f"from enginepool import lifeline; {broken}"))
    served.ready_line()
    tree = tree_of(served.pid)
    assert len(tree) >= 3
    os.kill(served.pid, signal.SIGKILL)
    wait_for_end(tree)
    served.finish()


@pytest.mark.parametrize(
    ("engine_args", "arguments"),
    [
        pytest.param({"fail_start": [0, 1]}, [], id="refused"),
        pytest.param({"fail_start": [1], "start_s": 0.2}, ["--max-restarts", "0"], id="one of two refused"),
        pytest.param({"crash_start": [0, 1]}, ["--max-restarts", "1", "--backoff-s", "0.01"], id="crashed"),
        pytest.param({"hang_start": [0, 1]}, ["--start-timeout-s", "0.5", "--max-restarts", "0"], id="hung"),
    ],
)
def test_failed_start_leaves_nothing(serve: Serve, place: Place, engine_args: dict[str, Any], arguments: list[str]) -> None:
    served = start(serve, place, *arguments, **engine_args)
    assert served.finish()[0] == ExitCode.START_FAILED
    place.wait_until_empty()


def test_killed_worker_leaves_no_child(serve: Serve, place: Place) -> None:
    served = start(serve, place, "--backoff-s", "0.01")
    served.ready_line()
    with Pool.connect(place.endpoint) as pool:
        family = tree_of(worker_pids(pool)[0])
        assert len(family) == FAMILY_SIZE
        os.kill(family[0], signal.SIGKILL)
        wait_for_end(family)
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")
    served.process.terminate()
    assert served.finish()[0] == ExitCode.OK
    place.wait_until_empty()

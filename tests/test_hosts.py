"""A program with an embedded pool that is killed, in whatever state, takes the pool along."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import processes_of, wait_for
from leftovers import FAMILY_SIZE, WORK, Host, Place

UP = 'pool = Pool(engine="echo", workers=2); print("up", pool.status().pid, flush=True); time.sleep(600)'
PROGRAMS = {
    "idle": UP,
    "generating": """
pool = Pool(engine="echo", workers=2, step_s=0.002)
futures = [pool.submit("x", SamplingParams(max_tokens=10_000_000)) for _ in range(4)]
while pool.status().in_flight < 4: pass
print("up", flush=True); futures[0].result()
""",
    "loading": 'print("up", flush=True); Pool(engine="echo", workers=2, hang_start=[0, 1])',
    "loading by a thread": """
threading.Thread(target=lambda: Pool(engine="echo", workers=2, hang_start=[0, 1])).start()
print("up", flush=True); time.sleep(600)
""",
    "made by a thread that has ended": """
maker = threading.Thread(target=lambda: kept.append(Pool(engine="echo", workers=2)))
maker.start(); maker.join(); print("up", flush=True); time.sleep(600)
""",
    "closing": """
pool = Pool(engine="echo", workers=2, hang_close=True, shutdown_timeout_s=60)
print("up", flush=True); pool.close()
""",
}
REAPER = "import ctypes, subprocess, sys, time; ctypes.CDLL(None).prctl(36, 1); subprocess.Popen(sys.argv[1:]); time.sleep(600)"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One place for the whole module: each start there is the next one after a violent end."""
    return Place(tmp_path_factory.mktemp("place"))


Start = Callable[..., Host]


@pytest.fixture
def host(place: Place) -> Iterator[Start]:
    """Start programs; whatever is left of them in the end is killed."""
    started: list[Host] = []

    def make(program: str, wrapper: str | None = None, **environment: str) -> Host:
        started.append(Host(place, program, wrapper, **environment))
        return started[-1]

    yield make
    for one in started:
        one.kill()
    for process in processes_of(place.run):
        process.kill()


@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_host_leaves_nothing(place: Place, host: Start, name: str) -> None:
    program = host(PROGRAMS[name])
    assert program.wait_for_word()[0] == "up"
    wait_for(lambda: len(place.processes()) >= 2 + 2 * FAMILY_SIZE, "the workers with their families")
    program.kill()
    place.wait_until_empty()


@pytest.mark.parametrize("seed", range(6))
def test_host_killed_at_a_random_moment_leaves_nothing(place: Place, host: Start, seed: int) -> None:
    program = host(WORK)
    threading.Event().wait(random.Random(seed).uniform(0.1, 1.2))  # the moment of the fault, not a condition
    program.kill()
    place.wait_until_empty()


@pytest.mark.parametrize("wrapper", [None, REAPER], ids=["orphans go to init", "orphans stay in the session"])
def test_host_killed_while_its_dispatcher_is_stopped_leaves_nothing(place: Place, host: Start, wrapper: str | None) -> None:
    """The kernel continues a stopped process only when nobody of its session is left above it."""
    program = host(UP, wrapper)
    dispatcher = int(program.wait_for_word()[1])
    for worker in psutil.Process(dispatcher).children():
        os.killpg(worker.pid, signal.SIGSTOP)
    os.kill(dispatcher, signal.SIGSTOP)
    (top,) = [process.pid for process in processes_of(place.run) if process.ppid() == os.getpid()]
    victim = top if wrapper is None else psutil.Process(top).children()[0].pid
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(place.processes()) == (wrapper is not None), "the end of all but the wrapper", 5)
    program.kill()
    place.wait_until_empty()


@pytest.mark.vllm
def test_host_killed_while_the_embedded_model_is_prepared_leaves_nothing(place: Place, host: Start, tmp_path: Path) -> None:
    """It may take minutes, and nobody wants the model any more."""
    with (tmp_path / ".model.lock").open("w") as lock:  # as another process that prepares it
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = host('Pool(log_level="info")', ENGINEPOOL_CACHE=str(tmp_path))
        assert program.process.stderr is not None
        assert next(line for line in program.process.stderr if "waiting for another process" in line)
        program.kill()
        place.wait_until_empty()

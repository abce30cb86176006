"""Ctrl-C in a terminal, at any moment from the start of the program on: it ends, and nothing is left of its pool."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from conftest import Serve, is_alive, wait_for
from leftovers import WORK, Host, Place
from surroundings import customized

from enginepool import Pool, SamplingParams, Sidecar
from enginepool.client import child
from enginepool.errors import ExitCode

LATEST_S = 1.0
ENDS = (ExitCode.OK, ExitCode.INTERRUPTED, -signal.SIGINT)
TRACED = [code.__code__ for code in (child.Child.__init__, child.Child.start, Sidecar.start)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One place for the whole module: each start there is the next one after an interrupt."""
    return Place(tmp_path_factory.mktemp("place"))


def _interrupt(pid: int, has_ended: Callable[[], bool]) -> None:
    """Ctrl-C, and once more where the interpreter has swallowed the first before it has read a line of ours."""
    os.killpg(pid, signal.SIGINT)
    over = threading.Event()
    for _ in range(300):
        if has_ended():
            return
        over.wait(0.01)
    os.killpg(pid, signal.SIGINT)


@pytest.mark.parametrize("seed", range(8))
def test_serve_interrupted_at_a_random_moment_leaves_nothing(serve: Serve, place: Place, seed: int) -> None:
    served = serve("--engine", "echo", "--workers", "2", env=place.environment, preexec_fn=os.setpgrp)
    threading.Event().wait(random.Random(seed).uniform(0, LATEST_S))  # the moment of the fault, not a condition
    _interrupt(served.pid, lambda: served.process.poll() is not None)
    code, stderr = served.finish()
    assert code in ENDS or "init_import_site" in stderr
    place.wait_until_empty()


@pytest.mark.parametrize("seed", range(8))
def test_host_interrupted_at_a_random_moment_leaves_nothing(place: Place, seed: int) -> None:
    host = Host(place, WORK)
    threading.Event().wait(random.Random(seed).uniform(0, LATEST_S))  # the moment of the fault, not a condition
    _interrupt(host.process.pid, lambda: host.process.poll() is not None)
    stderr = host.finish()
    assert host.process.returncode in ENDS or "init_import_site" in stderr
    place.wait_until_empty()


def test_serve_interrupted_once_ends_well_with_what_it_has_begun(serve: Serve, place: Place) -> None:
    served = serve("--engine", "echo", "--workers", "2", env=place.environment, preexec_fn=os.setpgrp)
    served.ready_line()
    with Pool.connect(place.endpoint) as pool:
        futures = [pool.submit("begun", SamplingParams(max_tokens=5)) for _ in range(200)]
        assert futures[0].result(timeout=20).ok
        pool.status()  # its answer tells that all that was sent before it has been read
        os.killpg(served.pid, signal.SIGINT)
        assert all(future.result(timeout=20).ok for future in futures)
    assert served.finish()[0] == ExitCode.OK
    place.wait_until_empty()


SWALLOWING = """
import os, time
class Finder:
    def find_spec(self, name, *_):
        if name == "enginepool.serve":
            open({reached!r}, "w").close()
            try:
                time.sleep(5)
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, Finder())
"""
SLOW_CLAIM = """
import time
from enginepool import rundir
take = rundir.lock_file
def slowly(path):
    fd = take(path)
    open({reached!r}, "w").close()
    time.sleep(0.5)
    return fd
rundir.lock_file = slowly
"""


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [pytest.param(SWALLOWING, -signal.SIGINT, id="in an import"), pytest.param(SLOW_CLAIM, ExitCode.INTERRUPTED, id="taking its endpoint")],
)
def test_serve_interrupted_at_a_bad_moment_ends_and_leaves_nothing(serve: Serve, tmp_path: Path, code: str, exit_code: int) -> None:
    """Where an exception would be swallowed, or leave a file."""
    own, reached = Place(tmp_path), tmp_path / "reached"
    environment = own.environment | customized(tmp_path / "temp", everywhere=code.format(reached=str(reached)))
    served = serve("--engine", "echo", env=environment)
    wait_for(reached.exists, "the moment")
    served.process.send_signal(signal.SIGINT)
    assert served.finish(15)[0] == exit_code
    own.wait_until_deserted()
    assert not own.run.exists() or not list(own.run.iterdir())


class Interruption:
    """Raises KeyboardInterrupt at the `number`th line, or end of a function, of those that start a pool."""

    def __init__(self, number: int) -> None:
        self.left = number

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in TRACED:
            return None
        if event in ("line", "return"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


@pytest.fixture
def traceless() -> Iterator[None]:
    """Whoever traced this before does so afterwards."""
    before = sys.gettrace()
    yield
    sys.settrace(before)


@pytest.mark.usefixtures("traceless", "fresh_run_dir")
def test_start_interrupted_at_any_line_leaves_nothing_that_can_not_be_ended() -> None:
    """The program catches the interrupt, ends what it has tried to start, and goes on."""
    number = 1
    kept: list[Sidecar] = []
    while _is_interrupted_at(number, kept):
        kept[-1].kill()
        left = psutil.Process().children()
        wait_for(lambda: not [process for process in left if is_alive(process.pid)], f"the end of {left} after {number} lines", 5)  # noqa: B023
        number += 1
    kept[-1].kill()
    assert number > 20


def _is_interrupted_at(number: int, kept: list[Sidecar]) -> bool:
    """Start a dispatcher and interrupt it there; False when it had begun before."""
    kept.append(Sidecar(engine="echo", workers=1))
    sys.settrace(Interruption(number).trace)
    try:
        kept[-1].start()
    except KeyboardInterrupt:
        return True
    sys.settrace(None)
    return False

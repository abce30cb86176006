"""Signals where they were not aimed at, a terminal that closes, and a dispatcher that is process 1 of its container."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ENGINEPOOL, Serve, tree_of, wait_for, worker_pids
from surroundings import config

from enginepool import Pool, PoolState, SamplingParams
from enginepool.errors import ExitCode

LONG = SamplingParams(max_tokens=100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_one_worker_changes_nothing(number: signal.Signals) -> None:
    """Stopping is the dispatcher's business."""
    with Pool(engine="echo", workers=2, step_s=0.002) as pool:
        pids = worker_pids(pool)
        future = pool.submit("in flight", LONG)
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        os.kill(pids[0], number)
        os.kill(pids[1], number)
        assert future.result(timeout=20).attempts == 1
        assert worker_pids(pool) == pids
        assert pool.status().state is PoolState.READY


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signal_to_the_dispatcher_drains(serve: Serve, tmp_path: Path, number: signal.Signals) -> None:
    served = serve("--engine", "echo", "--config", config(tmp_path, step_s=0.005))
    served.ready_line()
    with Pool.connect() as pool:
        future = pool.submit("in flight", LONG)
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        served.process.send_signal(number)
        assert future.result(timeout=20).ok
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert "Traceback" not in stderr


def test_terminal_that_closes_drains(fresh_run_dir: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and what is written to the terminal afterwards fails."""
    master, slave = os.openpty()
    arguments = ["serve", "--engine", "echo", "--config", config(tmp_path, step_s=0.005)]
    process = subprocess.Popen(
        [*ENGINEPOOL, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the pool's start")
        with Pool.connect() as pool:
            wait_for(lambda: pool.status().state is PoolState.READY, "the pool")
            future = pool.submit("in flight", LONG)
            wait_for(lambda: pool.status().in_flight == 1, "one in flight")
            os.close(master)
            assert future.result(timeout=20).ok
        assert process.wait(20) == ExitCode.OK
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def container(fresh_run_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`enginepool serve` as process 1 of a process namespace of its own."""
    isolate = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*isolate, "true"], capture_output=True).returncode:
        pytest.skip("no process namespace can be made here")
    arguments = ["serve", "--engine", "echo", "--workers", "2", "--ready-fd", "1", "--config", config(tmp_path, step_s=0.005)]
    process = subprocess.Popen([*isolate, *ENGINEPOOL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


INSIDE = """
import os, signal, sys
from enginepool import Pool, PoolState, SamplingParams
with Pool.connect() as pool:
    assert pool.status().pid == 1
    for _ in range(3):
        os.kill(pool.status().workers[0].pid, signal.SIGKILL)
        while pool.status().state is not PoolState.DEGRADED: pass
        while pool.status().state is not PoolState.READY: pass
    future = pool.submit("in flight", SamplingParams(max_tokens=100))
    while pool.status().in_flight == 0: pass
    print("ready for the signal", flush=True)
    print(future.result(timeout=20).ok, flush=True)
"""


def test_dispatcher_as_process_1_reaps_what_it_inherits_and_drains(container: subprocess.Popen[str]) -> None:
    assert container.stdout is not None
    assert json.loads(container.stdout.readline())["pid"] == 1
    (dispatcher,) = psutil.Process(container.pid).children()
    enter = ["nsenter", "--target", str(dispatcher.pid), "--pid", "--mount"]
    client = subprocess.Popen([*enter, sys.executable, "-c", INSIDE], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "ready for the signal\n"
    wait_for(lambda: not _zombies(dispatcher.pid), f"the reaping of {_zombies(dispatcher.pid)}")
    dispatcher.send_signal(signal.SIGTERM)
    assert client.communicate(timeout=20)[0] == "True\n"
    _, stderr = container.communicate(timeout=20)
    assert container.returncode == ExitCode.OK, stderr
    assert "Traceback" not in stderr


def _zombies(pid: int) -> list[int]:
    return [one for one in tree_of(pid) if psutil.Process(one).status() == psutil.STATUS_ZOMBIE]

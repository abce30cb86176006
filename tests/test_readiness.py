"""Ready means ready: never before a worker has generated a token, with a reason while workers are missing, and again once they are back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import Serve, wait_for, worker_pids
from surroundings import config

from enginepool import EnginePoolError, Pool, PoolState, PoolStatus, SamplingParams, SettingsError, Sidecar
from enginepool.clock import monotonic

FIVE = SamplingParams(max_tokens=5)


def _status() -> PoolStatus | None:
    """What the default endpoint tells, if anybody is there."""
    try:
        with Pool.connect() as pool:
            return pool.status()
    except EnginePoolError:
        return None


def test_nothing_says_ready_before_a_request_is_answered_at_once(serve: Serve, tmp_path: Path) -> None:
    """Status and ready file are asked from the start on; the first yes of either is true."""
    path = tmp_path / "ready.json"
    serve("--engine", "echo", "--workers", "2", "--config", config(tmp_path, start_s=0.5), "--ready-file", str(path))
    seen: list[PoolState] = []

    def is_ready() -> bool:
        was_there = path.exists()
        status = _status()
        if status is not None:
            seen.append(status.state)
            assert status.state in (PoolState.STARTING, PoolState.READY)
            assert (status.state is PoolState.READY) == all(worker.state == "ready" for worker in status.workers)
            assert not was_there or status.state is PoolState.READY
        return was_there or (status is not None and status.state is PoolState.READY)

    wait_for(is_ready, "the first yes")
    with Pool.connect() as pool:
        assert pool.generate("hello", FIVE, timeout_s=5).ok
    assert seen[0] is PoolState.STARTING


def test_sidecar_is_not_settled_before_every_worker_is_ready(fresh_run_dir: Path) -> None:
    stages: list[tuple[int, str]] = []
    sidecar = Sidecar(engine="echo", workers=2, start_s=0.3)
    sidecar.on_stage = lambda worker, text: stages.append((worker, text))
    with sidecar:
        assert {worker for worker, text in stages if text == "ready"} == {0, 1}
        assert sidecar.ready is not None
        with Pool.connect(sidecar.endpoint) as pool:
            assert pool.generate("hello", FIVE, timeout_s=5).ok


def test_killed_worker_is_a_reason_until_it_is_back() -> None:
    with Pool(engine="echo", workers=2, start_s=0.3) as pool:
        assert pool.status().reason is None
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        wait_for(lambda: pool.status().state is PoolState.DEGRADED, "the loss")
        reason = str(pool.status().reason)
        assert reason.startswith("worker 0 is being started again: its last process was killed by SIGKILL")
        assert pool.generate("hello", FIVE).worker == 1
        wait_for(lambda: pool.status().state is PoolState.READY, "the return")
        assert pool.status().reason is None


def test_both_workers_killed_is_told_and_work_waits() -> None:
    with Pool(engine="echo", workers=2, start_s=0.3) as pool:
        for pid in worker_pids(pool):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: str(pool.status().reason).startswith("no worker is ready, so items wait"), "the loss of both")
        assert pool.status().state is PoolState.DEGRADED
        future = pool.submit("waits", FIVE)
        assert pool.status().backlog == 1
        assert future.result(timeout=20).ok
        wait_for(lambda: pool.status().state is PoolState.READY, "the return of both")


@pytest.mark.parametrize("workers", [0, -1])
def test_pool_without_workers_is_refused(workers: int) -> None:
    with pytest.raises(SettingsError, match="workers must be at least 1"):
        Pool(engine="echo", workers=workers)


def test_status_answers_while_all_cores_are_busy() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        with Pool(engine="echo", workers=2, step_s=0.001) as pool:
            futures = [pool.submit("work", SamplingParams(max_tokens=200)) for _ in range(64)]
            slowest = 0.0
            while not all(future.done() for future in futures):
                started = monotonic()
                pool.status()
                slowest = max(slowest, monotonic() - started)
                threading.Event().wait(0.05)
            assert slowest < 1
    finally:
        for process in busy:
            process.kill()
            process.wait()

"""The way back: waits that double, workers that fail in their start for a while, a budget that ends, and items that wait meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

from conftest import Serve, wait_for, worker_pids
from surroundings import config, customized, gated

from enginepool import Code, Pool, PoolState, SamplingParams, WorkerState
from enginepool.errors import ExitCode

FIVE = SamplingParams(max_tokens=5)
KILLS = 10


def _crashing(folder: Path, broken: Path) -> dict[str, str]:
    """The environment of a pool whose workers crash in their start while a file of this name is there."""
    return customized(folder, worker=f"import os\nif os.path.exists({str(broken)!r}): os._exit(9)")


def _waits(stderr: str) -> list[tuple[float, float]]:
    """Of each death: how long the wait was told to be, and how long it was."""
    entries = [(json.loads(line)["time"], str(json.loads(line)["message"])) for line in stderr.splitlines()]
    deaths = [(time, float(match[1])) for time, message in entries if (match := re.search(r"restart in ([\d.]+) s", message))]
    starts = [time for time, message in entries if message.startswith("started again")]
    return [(told, _seconds(start) - _seconds(death)) for (death, told), start in zip(deaths, starts, strict=True)]


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def test_worker_that_crashes_in_its_start_for_a_while_comes_back_after_doubling_waits(serve: Serve, tmp_path: Path) -> None:
    """It was up before, so this is transient; what waits is done in the end."""
    broken = tmp_path / "broken"
    served = serve("--engine", "echo", "--backoff-s", "0.1", "--log-format", "json", env=_crashing(tmp_path, broken))
    served.ready_line()
    with Pool.connect() as pool:
        broken.touch()
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        future = pool.submit("waits", FIVE)
        wait_for(lambda: pool.status().workers[0].restarts >= 3, "the third start")
        reason = str(pool.status().reason)
        assert reason.startswith("no worker is ready, so items wait\nworker 0 is being started again: its last process exited with code 9")
        broken.unlink()
        assert future.result(timeout=30).text == "waits"
        wait_for(lambda: pool.status().state is PoolState.READY, "the recovery")
        assert pool.status().reason is None
    served.process.terminate()
    code, stderr = served.finish()
    assert code == ExitCode.OK
    told = [wait for wait, _ in _waits(stderr)]
    assert told == [0.1 * 2**number for number in range(len(told))]
    assert all(wait - 0.03 <= real < wait + 2 for wait, real in _waits(stderr)), _waits(stderr)  # the log has milliseconds


def test_worker_refused_in_its_start_after_the_pool_was_up_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    """An orderly refusal is for good only before any worker was ready."""
    broken = tmp_path / "broken"
    code = f"import os, sys\nif os.path.exists({str(broken)!r}): sys.modules['enginepool.worker.echo_engine'] = None"
    served = serve("--engine", "echo", "--backoff-s", "0.05", env=customized(tmp_path, worker=code))
    served.ready_line()
    with Pool.connect() as pool:
        broken.touch()
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        wait_for(lambda: "exited with code 3" in str(pool.status().workers[0].last_exit), "the refusal")
        assert "exited with code 3: ModuleNotFoundError: import of enginepool.worker.echo_engine halted" in str(pool.status().reason)
        broken.unlink()
        assert pool.generate("hello", FIVE, timeout_s=30).ok


def test_only_worker_killed_ten_times_at_random_moments_loses_nothing_that_waits() -> None:
    dice = random.Random(7)
    limits: dict[str, Any] = {"max_restarts": 1000, "restart_window_s": 0.1, "backoff_s": 0.01}
    with Pool(engine="echo", workers=1, step_s=0.002, max_num_seqs=4, **limits) as pool:
        futures = [pool.submit(f"item {index}", SamplingParams(max_tokens=20)) for index in range(200)]
        killed: set[int] = set()
        while len(killed) < KILLS:
            wait_for(lambda: set(worker_pids(pool)) - killed, "a fresh process")
            threading.Event().wait(dice.uniform(0, 0.4))  # the moment of the fault, not a condition
            killed.update(victim := worker_pids(pool))
            for pid in victim:
                os.kill(pid, signal.SIGKILL)
        outputs = [future.result(timeout=60) for future in futures]
        assert [str(output.text) for output in outputs] == [(f"item {index}" * 4)[:20] for index in range(200)]
        status = pool.status()
        assert (status.finished, status.failed, status.workers[0].restarts) == (200, 0, KILLS)


def test_deaths_that_lie_far_apart_use_up_no_budget() -> None:
    with Pool(engine="echo", workers=1, max_restarts=1, restart_window_s=0.01, backoff_s=0.05) as pool:
        for restarts in (1, 2):
            os.kill(worker_pids(pool)[0], signal.SIGKILL)
            wait_for(lambda restarts=restarts: pool.status().workers[0].restarts == restarts, "the restart")  # type: ignore[misc]
            wait_for(lambda: pool.status().state is PoolState.READY, "the recovery")


def test_pool_whose_workers_are_given_up_one_by_one_ends_with_their_reasons(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2", "--max-restarts", "0")
    served.ready_line()
    with Pool.connect() as pool:
        first, second = worker_pids(pool)
        os.kill(first, signal.SIGSEGV)
        wait_for(lambda: pool.status().workers[0].state is WorkerState.FAILED, "the first to be given up")
        assert pool.status().state is PoolState.DEGRADED
        assert "worker 0: was killed by SIGSEGV" in str(pool.status().reason)
        assert pool.generate("still served", FIVE).worker == 1
        future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
        wait_for(lambda: pool.status().in_flight == 1, "work in hand")
        os.kill(second, signal.SIGABRT)
        error = future.result(timeout=30).error
    assert error is not None
    assert error.code is Code.POOL_LOST
    assert "worker 0: was killed by SIGSEGV" in error.message
    assert "worker 1: was killed by SIGABRT" in error.message
    code, stderr = served.finish()
    assert code == ExitCode.ALL_WORKERS_FAILED
    assert "worker 1: was killed by SIGABRT" in stderr


def test_pool_whose_workers_are_given_up_in_a_drain_fails_and_says_so(serve: Serve, tmp_path: Path) -> None:
    served = serve("--engine", "echo", "--max-restarts", "0", "--config", config(tmp_path, step_s=0.005))
    served.ready_line()
    with Pool.connect() as pool:
        future = pool.submit("endless", SamplingParams(max_tokens=10_000_000))
        wait_for(lambda: pool.status().in_flight == 1, "work in hand")
        served.process.terminate()
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        error = future.result(timeout=30).error
    assert error is not None
    assert error.code is Code.POOL_LOST
    assert served.finish()[0] == ExitCode.ALL_WORKERS_FAILED


def test_one_worker_that_never_comes_back_leaves_the_other_alone(serve: Serve, tmp_path: Path) -> None:
    """Until its start limit it counts as starting; no item waits for it."""
    gate = tmp_path / "shut"
    served = serve("--engine", "echo", "--workers", "2", "--start-timeout-s", "3", "--max-restarts", "1", env=gated(tmp_path, gate))
    served.ready_line()
    with Pool.connect() as pool:
        gate.touch()
        victim = pool.status().workers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        outputs = pool.generate_many([f"item {index}" for index in range(50)], FIVE)
        assert {output.worker for output in outputs if output.attempts > 1} <= {1}
        wait_for(lambda: pool.status().workers[0].state is WorkerState.FAILED, "the end of the budget")
        assert "no sign of life for 3 s while 'starting' (start_timeout_s)" in str(pool.status().reason)
        assert pool.generate("still served", FIVE).worker == 1

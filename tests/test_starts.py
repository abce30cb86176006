"""Workers that start slowly, or die while they start: noticed at once, told with their last words, retried within the budget."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from conftest import Serve, wait_for, worker_pids
from surroundings import config, customized, on_one_core

from enginepool import Pool, PoolState, SamplingParams
from enginepool.errors import ExitCode

SLOW = "import time; time.sleep(1.5)"


def test_slow_interpreters_on_one_core_come_up(serve: Serve, tmp_path: Path) -> None:
    served = serve("--engine", "echo", "--workers", "2", env=customized(tmp_path, worker=SLOW), preexec_fn=on_one_core())
    assert json.loads(served.ready_line())["state"] == "ready"


def test_interpreter_slower_than_the_limit_is_told(serve: Serve, tmp_path: Path) -> None:
    served = serve("--engine", "echo", "--start-timeout-s", "0.5", "--max-restarts", "0", env=customized(tmp_path, worker=SLOW))
    line = json.loads(served.ready_line())
    assert "no sign of life for 0.5 s while 'starting' (start_timeout_s)" in line["error"]
    assert served.finish()[0] == line["exit_code"] == ExitCode.START_FAILED


@pytest.mark.parametrize(
    ("death", "told"),
    [
        pytest.param("os.kill(os.getpid(), 9)", "was killed by SIGKILL (by somebody", id="SIGKILL"),
        pytest.param("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (a crash in native code)", id="SIGSEGV"),
        pytest.param("os._exit(7)", "exited with code 7", id="code 7"),
        pytest.param("os._exit(0)", "exited with code 0", id="code 0"),
    ],
)
def test_death_before_the_first_word_is_told_with_what_was_printed(serve: Serve, tmp_path: Path, death: str, told: str) -> None:
    code = f"import os; print('last words', file=sys.stderr, flush=True); {death}"
    served = serve("--engine", "echo", "--max-restarts", "1", "--backoff-s", "0.01", env=customized(tmp_path, worker=code))
    line = json.loads(served.ready_line())
    assert told in line["error"]
    assert "while 'starting'; its last lines:\n  last words" in line["error"]
    code_of_exit, stderr = served.finish()
    assert code_of_exit == line["exit_code"] == ExitCode.START_FAILED
    assert stderr.count("started") == 2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_workers_killed_at_random_moments_of_their_start_come_up(serve: Serve, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    serve("--engine", "echo", "--workers", "2", "--backoff-s", "0.01", "--config", config(tmp_path, start_s=0.3))
    wait_for(lambda: (tmp_path / "run" / "default.sock.secret").exists(), "the pool's start")
    killed: set[int] = set()
    with Pool.connect() as pool:
        for _ in range(4):
            wait_for(lambda: set(worker_pids(pool)) - killed, "a worker")
            threading.Event().wait(dice.uniform(0, 0.4))  # the moment of the fault, not a condition
            victims = sorted(set(worker_pids(pool)) - killed)
            if victims:
                victim = dice.choice(victims)
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool")
        assert sum(worker.restarts for worker in pool.status().workers) == len(killed)
        assert pool.generate("hello", SamplingParams(max_tokens=5)).ok

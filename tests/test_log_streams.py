"""What a pool writes where: results nowhere, logs to stderr only, each line with its role, never a prompt; whatever stderr is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import ENGINEPOOL, Serve, wait_for, worker_pids
from surroundings import config

from enginepool import EnginePoolWarning, Pool, PoolState, SamplingParams
from enginepool.errors import ExitCode

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (dispatcher|worker \d+)\[\d+\] ")
SECRET = "the prompt nobody may read in a log"
NOISE = "first of a worker's lines\nprogress 1%\rprogress 100%\n\x1b[31mred\x1b[0m\n\nlast\n"
FAULTS = [{"fault": "raise", "at": 2}, {"fault": "exit", "at": 0}, {"fault": "segfault", "at": 3}]


def _work_with_faults(pool: Pool) -> None:
    """Good items, refused ones, and some that cost workers; all with the prompt that must not show."""
    params = [SamplingParams(max_tokens=5)] * 6 + [SamplingParams(max_tokens=0)] + [SamplingParams(extra_args=fault) for fault in FAULTS]
    with pytest.warns(EnginePoolWarning, match="4 of 10 items failed"):
        pool.generate_many([SECRET] * 10, params)
    pool.chat([{"role": "user", "content": SECRET}], {"max_tokens": 3}, chat_template="{{ raise_exception('no') }}")
    wait_for(lambda: pool.status().state is PoolState.READY, "the recovery", 30)


@pytest.mark.parametrize("level", ["debug", "info"])
def test_every_line_has_its_role_and_none_has_a_prompt(serve: Serve, tmp_path: Path, level: str) -> None:
    """On a dumb terminal or none: no carriage return, no escape sequence, and nothing on stdout."""
    served = serve(
        *("--engine", "echo", "--workers", "2", "--log-level", level, "--max-restarts", "30", "--backoff-s", "0.01"),
        *("--config", config(tmp_path, stdout=NOISE, step_s=0.001)),
        env={"TERM": "dumb"},
    )
    with Pool.connect(json.loads(served.ready_line())["endpoint"]) as pool:
        _work_with_faults(pool)
    served.process.send_signal(signal.SIGTERM)
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert [line for line in stderr.splitlines() if not LINE.match(line)] == []
    assert SECRET not in stderr
    assert "\r" not in stderr
    assert served.output[0] == ""
    assert ("first of a worker's lines" in stderr) == (level == "debug")


def test_every_line_of_a_failed_start_has_its_role(serve: Serve, tmp_path: Path) -> None:
    served = serve(
        "--engine", "echo", "--workers", "2", "--max-restarts", "0", "--config", config(tmp_path, stdout=NOISE, crash_start=[0, 1])
    )
    code, stderr = served.finish()
    assert code == ExitCode.START_FAILED
    assert "its last lines:\n" in stderr
    assert [line for line in stderr.splitlines() if not LINE.match(line)] == []


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)], ids=["stderr", "stdout and stderr", "all three"])
def test_closed_standard_descriptors_do_no_harm(serve: Serve, tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Another file would get the number of a closed descriptor, and the log be written into it."""
    served = serve(
        "--engine", "echo", "--workers", "2", "--config", config(tmp_path, stdout=NOISE), preexec_fn=lambda: os.closerange(min(closed), 3)
    )
    with Pool.connect(json.loads(served.ready_line())["endpoint"]) as pool:
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert all(output.ok for output in pool.generate_many(["hello"] * 20, SamplingParams(max_tokens=3)))
        wait_for(lambda: pool.status().state is PoolState.READY, "the recovery")
    served.process.send_signal(signal.SIGTERM)
    assert served.finish() == (ExitCode.OK, "")


def test_full_stderr_never_holds_up_work(fresh_run_dir: Path, tmp_path: Path) -> None:
    """Workers print more than the pipe holds while they are loading and while they work."""
    read_fd, write_fd = os.pipe()
    path = config(tmp_path, stdout="x" * 100 + "\n" * 2000, step_s=0.001)
    arguments = [
        "serve",
        "--engine",
        "echo",
        "--workers",
        "2",
        "--log-level",
        "debug",
        "--max-restarts",
        "100",
        "--backoff-s",
        "0.01",
        "--config",
        path,
    ]
    process = subprocess.Popen([*ENGINEPOOL, *arguments], stderr=write_fd, stdin=subprocess.DEVNULL)
    os.close(write_fd)
    try:
        wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the pool's start")
        with Pool.connect() as pool:
            wait_for(lambda: pool.status().state is PoolState.READY, "the pool")
            crash = SamplingParams(max_tokens=5, extra_args={"fault": "raise", "at": 2})
            with pytest.warns(EnginePoolWarning, match="1 of 20 items failed"):
                pool.generate_many(["hello"] * 20, [crash, *[SamplingParams(max_tokens=5)] * 19])
    finally:
        process.terminate()
        assert process.wait(20) == ExitCode.OK
        os.close(read_fd)

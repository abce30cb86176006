"""The examples run as their readers run them: to the end, through a worker's death, to a drain."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, kill_when, tree_of, wait_for, wait_for_end, worker_pids

from enginepool import Pool

SCHEDULER = REPO / "docs" / "examples" / "scheduler_sidecar.py"
SLOW = ["--engine", "echo", "--engine-args", json.dumps({"step_s": 0.002, "max_num_seqs": 4})]
SUM = re.compile(r"(\d+) of \d+ taken: (\d+) ok, (\d+) failed, (\d+) cancelled")


class Run:
    """A run of the scheduler."""

    def __init__(self, *arguments: str, jobs: list[dict[str, Any]] | None = None) -> None:
        command = [sys.executable, str(SCHEDULER), *arguments]
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True)
        self.lines: list[str] = []
        self.stderr = ""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(json.dumps(job) + "\n" for job in jobs or []))
        self.process.stdin.close()
        self.process.stdin = None

    def wait_until_up(self) -> None:
        """Read its first line."""
        self.read(1)
        assert self.lines[0].startswith("up at ipc://")
        self.pids = tree_of(self.process.pid)

    def read(self, count: int) -> None:
        """Read that many more lines."""
        assert self.process.stdout is not None
        for _ in range(count):
            self.lines.append(self.process.stdout.readline())

    def finish(self) -> tuple[int, int, int, int]:
        """Wait for a good end with nothing left; returns the printed numbers: taken, ok, failed, cancelled."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()  # `communicate` would miss what lies in the buffer of `read`
        code = self.process.wait(20)
        self._stderr.seek(0)
        self.stderr = self._stderr.read()
        assert code == 0, self.stderr
        assert "Traceback" not in self.stderr
        wait_for_end(self.pids)
        match = SUM.fullmatch(self.lines.pop().strip())
        assert match is not None
        taken, ok, failed, cancelled = map(int, match.groups())
        assert taken == ok + failed + cancelled
        return taken, ok, failed, cancelled

    def end(self) -> None:
        """Make sure that it is gone."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()

    @property
    def finished(self) -> list[str]:
        """The ids of the jobs that it told of, in that order."""
        return [line.split()[0] for line in self.lines[1:]]


@pytest.fixture
def runs(fresh_run_dir: Path) -> Iterator[list[Run]]:
    """Runs whose processes are killed at the end, should they still be there; nothing may stay in the run directory."""
    started: list[Run] = []
    yield started
    for run in started:
        run.end()
    wait_for(lambda: not list(fresh_run_dir.glob("*")), "the clean-up of the run directory", 5)


def test_scheduler_finishes_every_job(runs: list[Run]) -> None:
    runs.append(run := Run("--engine", "echo", "--jobs", "200"))
    run.wait_until_up()
    assert run.finish() == (200, 200, 0, 0)
    assert sorted(run.finished) == sorted(f"job-{number}" for number in range(200))


def test_scheduler_keeps_priorities_and_deadlines_of_its_jobs(runs: list[Run]) -> None:
    jobs: list[dict[str, Any]] = [
        {"id": "late", "prompt": "x", "max_tokens": 10**7, "deadline_s": 0.5, "priority": -1},
        *({"id": f"low-{number}", "prompt": "x", "max_tokens": 40, "priority": 5} for number in range(10)),
        {"id": "bad", "prompt": ""},
        {"id": "high", "prompt": "x", "max_tokens": 40, "priority": -1},
    ]
    slow = json.dumps({"step_s": 0.005, "max_num_seqs": 1})
    runs.append(run := Run("--engine", "echo", "--workers", "1", "--engine-args", slow, jobs=jobs))
    run.wait_until_up()
    assert run.finish() == (13, 11, 2, 0)
    assert {line.split()[0] for line in run.lines if " failed " in line} == {"late", "bad"}
    assert run.finished.index("high") < run.finished.index("low-9")


def test_scheduler_survives_a_killed_worker(runs: list[Run]) -> None:
    runs.append(run := Run(*SLOW, "--jobs", "1000"))
    run.wait_until_up()
    with Pool.connect() as pool:
        run.read(20)
        kill_when(lambda: pool.status().workers[0].in_flight > 0, "work of the worker", worker_pids(pool)[0]).join()
    assert run.finish() == (1000, 1000, 0, 0)
    assert sorted(run.finished) == sorted(f"job-{number}" for number in range(1000))
    assert "was killed by SIGKILL" in run.stderr


def test_scheduler_drains_on_sigterm(runs: list[Run]) -> None:
    runs.append(run := Run(*SLOW, "--jobs", "100000", "--window", "20"))
    run.wait_until_up()
    run.read(30)
    run.process.send_signal(signal.SIGTERM)
    taken, ok, failed, cancelled = run.finish()
    assert (ok, failed, cancelled) == (taken, 0, 0)
    assert 30 <= taken < 100000
    assert len(set(run.finished)) == taken


def test_scheduler_cancels_what_its_limit_does_not_wait_for(runs: list[Run]) -> None:
    jobs = [{"id": f"endless-{number}", "prompt": "x", "max_tokens": 10**7} for number in range(3)]
    runs.append(run := Run(*SLOW, "--drain-s", "0.2", jobs=jobs))
    run.wait_until_up()
    with Pool.connect() as pool:
        wait_for(lambda: pool.status().in_flight == 3, "all jobs to run")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == (3, 0, 0, 3)


def test_scheduler_that_is_ended_while_it_starts_leaves_nothing(runs: list[Run], fresh_run_dir: Path) -> None:
    runs.append(run := Run("--engine", "echo", "--engine-args", '{"hang_start": [0]}', "--jobs", "1"))
    wait_for(lambda: (fresh_run_dir / "default.sock.secret").exists(), "the dispatcher's start")
    pids = tree_of(run.process.pid)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(20) == -signal.SIGTERM
    wait_for_end(pids)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_scheduler_runs_the_embedded_model(runs: list[Run]) -> None:
    settings = json.dumps({"max_model_len": 256, "kv_cache_budget_bytes": 256 << 20})
    runs.append(run := Run("--workers", "1", "--jobs", "6", "--engine-args", settings))
    run.wait_until_up()
    assert run.finish() == (6, 6, 0, 0)

"""Lack of memory is told from a kill by somebody: the counter on made-up trees, and a real kill in a real control group."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Serve, wait_for

from enginepool import Code, EnginePoolWarning, Pool, PoolState, SamplingParams
from enginepool.dispatcher.cgroup import control_folders
from enginepool.dispatcher.oom import OomCounter, OomLedger, find_counter
from enginepool.dispatcher.supervisor import describe_exit
from enginepool.errors import ExitCode

V1 = {
    "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "proc/self/cgroup": "7:memory:/a/b\n0::/\n",
    "sys/fs/cgroup/memory/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "209715200\n",
}
V2 = {
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "proc/self/cgroup": "0::/a\n",
    "sys/fs/cgroup/a/memory.events": "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n",
    "sys/fs/cgroup/a/memory.max": "209715200\n",
}
V2_ROOT = {"proc/self/mountinfo": V2["proc/self/mountinfo"], "proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 5\noom_kill 3\n"}


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _counter(folder: Path, count: int) -> OomCounter:
    path = folder / "memory.events"
    path.write_text(f"oom 0\noom_kill {count}\n")
    return OomCounter(path, 200 << 20)


@pytest.mark.parametrize(
    ("files", "name", "limit"),
    [
        pytest.param(V1, "memory.oom_control", 200 << 20, id="v1 with the limit at a parent"),
        pytest.param(V2, "memory.events", 200 << 20, id="v2"),
        pytest.param(V2_ROOT, "vmstat", None, id="root of v2"),
    ],
)
def test_counter_is_found(tmp_path: Path, files: dict[str, str], name: str, limit: int | None) -> None:
    _write(tmp_path, files)
    counter = find_counter(tmp_path)
    assert counter is not None
    assert (counter.path.name, counter.limit_bytes) == (name, limit)
    verdict = OomLedger(counter).ended(0)
    assert (verdict.is_oom, f"rose from 0 to 3{'; the memory limit is 200 MiB' if limit else ''}" in verdict.text) == (True, True)


def test_no_counter_is_no_evidence(tmp_path: Path) -> None:
    assert find_counter(tmp_path) is None
    verdict = OomLedger(None).ended(0)
    assert (verdict.is_oom, "no oom_kill counter can be read" in verdict.text) == (False, True)


def test_counter_that_stands_still_means_somebody(tmp_path: Path) -> None:
    ledger = OomLedger(_counter(tmp_path, 3))
    ledger.started(0)
    verdict = ledger.ended(0)
    assert not verdict.is_oom
    assert "by somebody, not for lack of memory: oom_kill is still 3" in verdict.text


def test_one_rise_explains_one_death(tmp_path: Path) -> None:
    ledger = OomLedger(_counter(tmp_path, 0))
    for index in range(3):
        ledger.started(index)
    _counter(tmp_path, 2)
    assert [ledger.ended(index).is_oom for index in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(-9, "was killed by SIGKILL (out of memory: oom_kill in ", id="the worker"),
        pytest.param(70, "exited with code 70; meanwhile the kernel killed a process (out of memory: ", id="its engine core"),
        pytest.param(-11, "was killed by SIGSEGV (a crash in native code); meanwhile the kernel killed a process (out of", id="a crash"),
        pytest.param(-35, "was killed by signal 35; meanwhile the kernel killed", id="a signal without a name"),
    ],
)
def test_exit_is_described_with_what_the_counter_says(tmp_path: Path, code: int, expected: str) -> None:
    ledger = OomLedger(_counter(tmp_path, 0))
    ledger.started(0)
    _counter(tmp_path, 1)
    assert describe_exit(code, ledger.ended(0)).startswith(expected)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real memory control group of 200 MiB below this process's own."""
    own = control_folders(Path("/"), "memory")[0]
    folder = own / f"enginepool-test-{os.getpid()}"
    limit = folder / ("memory.max" if (own / "memory.max").exists() else "memory.limit_in_bytes")
    try:
        folder.mkdir()
        limit.write_text(str(200 << 20))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the end of the processes in the group", 10)
    folder.rmdir()


def test_worker_out_of_memory_is_told_from_one_that_somebody_killed(limited_group: Path, serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2", preexec_fn=lambda: (limited_group / "cgroup.procs").write_text(str(os.getpid())))
    with Pool.connect(json.loads(served.ready_line())["endpoint"]) as pool:
        params = [SamplingParams(max_tokens=4, extra_args={"fault": "oom"} if index == 3 else None) for index in range(8)]
        with pytest.warns(EnginePoolWarning, match="1 of 8 items failed"):
            outputs = pool.generate_many(["item"] * 8, params)
        error = outputs[3].error
        assert error is not None
        assert error.code is Code.WORKER_LOST
        assert f"was killed by SIGKILL (out of memory: oom_kill in {limited_group}/memory." in error.message
        assert "the memory limit is 200 MiB" in error.message
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")
        victim = pool.status().workers[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: "by somebody, not for lack of memory" in str(pool.status().workers[1].last_exit), "the second exit")
    served.process.terminate()
    served.finish()


@pytest.mark.vllm
def test_kv_cache_is_measured_by_the_limit_of_the_real_group(limited_group: Path, serve: Serve) -> None:
    """Two workers do not fit into it, and that is told before anything loads."""
    served = serve("--workers", "2", preexec_fn=lambda: (limited_group / "cgroup.procs").write_text(str(os.getpid())))
    code, stderr = served.finish()
    assert code == ExitCode.USAGE
    assert "the KV cache of one worker would be 50 MiB, less than 64 MiB" in stderr
    assert "half of 200 MiB (the cgroup's memory limit)" in stderr


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("value", "told"),
    [
        pytest.param("abc", "VLLM_CPU_KVCACHE_SPACE is 'abc'; give the GiB for all workers together", id="a word"),
        pytest.param("-1", "VLLM_CPU_KVCACHE_SPACE is '-1'", id="below zero"),
        pytest.param("1000000", "VLLM_CPU_KVCACHE_SPACE asks for 1000000.0 GiB of KV cache, more than the", id="more than there is"),
    ],
)
def test_impossible_kv_budget_of_the_environment_is_refused_before_loading(serve: Serve, value: str, told: str) -> None:
    code, stderr = serve("--workers", "2", env={"VLLM_CPU_KVCACHE_SPACE": value}).finish()
    assert code == ExitCode.USAGE
    assert told in stderr

"""Ways of dying, each at every stage: items end once and elsewhere, the pool comes back, drains and stops end as they should."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Serve, wait_for

from enginepool import Output, Pool, PoolState, SamplingParams, WorkerState

LONG = SamplingParams(max_tokens=60)
Kill = Callable[[int], None]


def _stop_and_kill(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)


FROM_OUTSIDE = [
    pytest.param(lambda pid: os.kill(pid, signal.SIGKILL), "SIGKILL", id="SIGKILL"),
    pytest.param(lambda pid: os.kill(pid, signal.SIGSEGV), "SIGSEGV", id="SIGSEGV"),
    pytest.param(lambda pid: os.kill(pid, signal.SIGABRT), "SIGABRT", id="SIGABRT"),
    pytest.param(_stop_and_kill, "SIGKILL", id="SIGKILL while it is stopped"),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    """Two workers that may die as often as they like."""
    with Pool(engine="echo", workers=2, step_s=0.005, max_num_seqs=4, max_restarts=1000, restart_window_s=0.5, backoff_s=0.01) as pool:
        yield pool


@pytest.fixture
def pool(shared: Pool) -> Pool:
    """The same, with both workers ready."""
    wait_for(lambda: shared.status().state is PoolState.READY, "both workers")
    return shared


def _pid(pool: Pool, index: int) -> int:
    pid = pool.status().workers[index].pid
    assert pid is not None
    return pid


def _is_own(output: Output, prompt: str) -> bool:
    return output.ok and output.prompt == prompt and str(output.text).startswith(prompt)


@pytest.mark.parametrize(("kill", "told"), FROM_OUTSIDE)
def test_idle_worker_that_dies_comes_back(pool: Pool, kill: Kill, told: str) -> None:
    before = pool.status().workers[1].restarts
    kill(_pid(pool, 1))
    wait_for(lambda: pool.status().workers[1].restarts == before + 1, "the restart")
    wait_for(lambda: pool.status().state is PoolState.READY, "the recovery")
    assert told in str(pool.status().workers[1].last_exit)
    assert pool.generate("still here", SamplingParams(max_tokens=3)).ok


@pytest.mark.parametrize(("kill", "told"), FROM_OUTSIDE)
def test_item_of_a_dead_worker_runs_in_another_one(pool: Pool, kill: Kill, told: str) -> None:
    futures = [pool.submit(f"item {index}", LONG) for index in range(8)]
    wait_for(lambda: all(worker.in_flight for worker in pool.status().workers), "work for both")
    kill(_pid(pool, 0))
    outputs = [future.result(timeout=30) for future in futures]
    assert all(_is_own(output, f"item {index}") for index, output in enumerate(outputs))
    assert {output.worker for output in outputs if output.attempts > 1} == {1}
    assert told in str(pool.status().workers[0].last_exit)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param({"fault": "exit", "code": 0}, "exited with code 0", id="exit 0"),
        pytest.param({"fault": "exit"}, "exited with code 9", id="exit 9"),
        pytest.param({"fault": "raise"}, "exited with code 70 after RuntimeError", id="exception out of a step"),
        pytest.param({"fault": "segfault"}, "SIGSEGV", id="crash"),
        pytest.param({"fault": "kill"}, "SIGKILL", id="SIGKILL to itself"),
    ],
)
def test_worker_that_ends_by_itself_once_costs_nobody_anything(pool: Pool, tmp_path: Path, fault: dict[str, object], told: str) -> None:
    once = SamplingParams(max_tokens=10, extra_args={"at": 3, "once": str(tmp_path / "once")} | fault)
    futures = [pool.submit(f"item {index}", once if index == 3 else LONG) for index in range(8)]
    outputs = [future.result(timeout=30) for future in futures]
    assert all(_is_own(output, f"item {index}") for index, output in enumerate(outputs))
    assert outputs[3].attempts == 2
    assert any(told in str(worker.last_exit) for worker in pool.status().workers)


def test_sigterm_to_a_worker_changes_nothing(pool: Pool) -> None:
    pids = [_pid(pool, index) for index in range(2)]
    futures = [pool.submit(f"item {index}", LONG) for index in range(8)]
    wait_for(lambda: all(worker.in_flight for worker in pool.status().workers), "work for both")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert [future.result(timeout=30).attempts for future in futures] == [1] * 8
    assert [_pid(pool, index) for index in range(2)] == pids


def test_death_while_the_other_worker_starts_loses_nothing(pool: Pool) -> None:
    futures = [pool.submit(f"item {index}", LONG) for index in range(16)]
    wait_for(lambda: all(worker.in_flight for worker in pool.status().workers), "work for both")
    os.kill(_pid(pool, 0), signal.SIGKILL)
    wait_for(lambda: pool.status().workers[0].state is WorkerState.STARTING, "the other start")
    os.kill(_pid(pool, 1), signal.SIGKILL)
    assert all(_is_own(future.result(timeout=30), f"item {index}") for index, future in enumerate(futures))


@pytest.mark.parametrize("seed", range(3))
def test_worker_killed_again_and_again_while_it_starts_loses_nothing(pool: Pool, seed: int) -> None:
    futures = [pool.submit(f"item {index}", LONG) for index in range(12)]
    for turn in range(4):
        index = (seed + turn) % 2
        wait_for(lambda index=index: pool.status().workers[index].pid, "a process")  # type: ignore[misc]
        os.kill(_pid(pool, index), signal.SIGKILL)
    assert all(_is_own(future.result(timeout=60), f"item {index}") for index, future in enumerate(futures))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_death_in_a_drain_is_made_up_for_and_the_exit_is_clean(serve: Serve, tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "slow.toml"
    config.write_text("backoff_s = 0.01\n[engine_args]\nstep_s = 0.01\n")
    served = serve("--engine", "echo", "--workers", "2", "--config", str(config))
    served.ready_line()
    with Pool.connect() as pool:
        futures = [pool.submit(f"item {index}", SamplingParams(max_tokens=100)) for index in range(20)]
        wait_for(lambda: pool.status().workers[0].in_flight, "work in hand")
        victim = _pid(pool, 0)
        os.kill(served.pid, signal.SIGTERM)
        assert served.process.stderr is not None
        assert next(line for line in served.process.stderr if "draining" in line)
        os.kill(victim, number)
        outputs = [future.result(timeout=60) for future in futures]
    assert all(_is_own(output, f"item {index}") for index, output in enumerate(outputs))
    assert max(output.attempts for output in outputs) == 2
    code, _ = served.finish()
    assert code == 0


def test_death_in_the_shutdown_is_no_failure(serve: Serve, tmp_path: Path) -> None:
    config = tmp_path / "hanging.toml"
    config.write_text("shutdown_timeout_s = 60\n[engine_args]\nhang_close = true\n")
    served = serve("--engine", "echo", "--workers", "2", "--config", str(config))
    served.ready_line()
    with Pool.connect() as pool:
        victims = [_pid(pool, index) for index in range(2)]
    os.kill(served.pid, signal.SIGTERM)
    assert served.process.stderr is not None
    assert next(line for line in served.process.stderr if "stopping" in line)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    code, _ = served.finish()
    assert code == 0

"""Ways of dying, each at every stage: items end once and elsewhere, the pool comes back, drains and stops end as they should."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Serve, wait_for
from surroundings import config, gated

from enginepool import Code, Output, OutputFuture, Pool, PoolState, SamplingParams, WorkerState
from enginepool.errors import ExitCode

LONG = SamplingParams(max_tokens=100)
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
    """Two workers that may die as often as they like, each with room for eight items."""
    with Pool(engine="echo", workers=2, step_s=0.005, max_num_seqs=8, max_restarts=1000, restart_window_s=0.5, backoff_s=0.01) as pool:
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


def _in_both_hands(pool: Pool, count: int, params: SamplingParams = LONG) -> list[OutputFuture]:
    """Submit items, of which each worker holds some now; anew where they were done before anybody looked."""
    futures: list[OutputFuture] = []

    def is_seen() -> bool:
        if all(future.done() for future in futures):
            futures[:] = [pool.submit(f"item {index}", params) for index in range(count)]
        return all(worker.in_flight for worker in pool.status().workers)

    wait_for(is_seen, "work in both hands")
    return futures


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
    futures = _in_both_hands(pool, 8)
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


@pytest.mark.parametrize(
    ("kill", "told", "after_s"),
    [pytest.param(*way.values, 0.05 * index, id=f"{way.id} after {0.05 * index:.2f} s") for index, way in enumerate(FROM_OUTSIDE)],
)
def test_worker_that_dies_while_it_starts_again_is_started_once_more(pool: Pool, kill: Kill, told: str, after_s: float) -> None:
    """Before its first word, and in the middle of the start."""
    before = pool.status().workers[1].restarts
    os.kill(_pid(pool, 1), signal.SIGKILL)
    wait_for(lambda: pool.status().workers[1].restarts == before + 1, "the restart")
    future = pool.submit("item", LONG)
    threading.Event().wait(after_s)  # the moment of the fault, not a condition
    kill(_pid(pool, 1))
    wait_for(lambda: pool.status().workers[1].restarts == before + 2, "the next restart")
    wait_for(lambda: pool.status().state is PoolState.READY, "the recovery")
    assert told in str(pool.status().workers[1].last_exit)
    assert _is_own(future.result(timeout=30), "item")


@pytest.mark.parametrize(("kill", "told"), FROM_OUTSIDE)
def test_both_workers_dying_at_once_lose_nothing(pool: Pool, kill: Kill, told: str) -> None:
    futures = _in_both_hands(pool, 16)
    for pid in [_pid(pool, index) for index in range(2)]:
        kill(pid)
    assert all(_is_own(future.result(timeout=30), f"item {index}") for index, future in enumerate(futures))
    assert all(told in str(worker.last_exit) for worker in pool.status().workers)


def test_sigterm_to_a_worker_changes_nothing(pool: Pool) -> None:
    pids = [_pid(pool, index) for index in range(2)]
    futures = _in_both_hands(pool, 8)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert [future.result(timeout=30).attempts for future in futures] == [1] * 8
    assert [_pid(pool, index) for index in range(2)] == pids


def test_death_while_the_other_worker_starts_loses_nothing(pool: Pool) -> None:
    futures = _in_both_hands(pool, 16)
    os.kill(_pid(pool, 0), signal.SIGKILL)
    wait_for(lambda: pool.status().workers[0].state is WorkerState.STARTING, "the other start")
    os.kill(_pid(pool, 1), signal.SIGKILL)
    assert all(_is_own(future.result(timeout=30), f"item {index}") for index, future in enumerate(futures))


@pytest.mark.parametrize("seed", range(3))
def test_worker_killed_again_and_again_while_it_starts_loses_nothing(pool: Pool, seed: int) -> None:
    futures = [pool.submit(f"item {index}", LONG) for index in range(12)]
    killed: set[int | None] = {None}
    for turn in range(4):
        index = (seed + turn) % 2
        wait_for(lambda index=index: pool.status().workers[index].pid not in killed, "a fresh process")  # type: ignore[misc]
        killed.add(_pid(pool, index))
        os.kill(_pid(pool, index), signal.SIGKILL)
    assert all(_is_own(future.result(timeout=60), f"item {index}") for index, future in enumerate(futures))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_death_in_a_drain_is_made_up_for_and_the_exit_is_clean(serve: Serve, tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "slow.toml"
    config.write_text("backoff_s = 0.01\n[engine_args]\nstep_s = 0.01\n")
    served = serve("--engine", "echo", "--workers", "2", "--config", str(config))
    served.ready_line()
    with Pool.connect() as pool:
        futures = _in_both_hands(pool, 20, SamplingParams(max_tokens=100))
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


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"fault": "exit", "code": 0}, id="exit 0"),
        pytest.param({"fault": "exit"}, id="exit 9"),
        pytest.param({"fault": "raise"}, id="exception out of a step"),
    ],
)
def test_worker_that_ends_by_itself_in_a_drain_is_made_up_for(serve: Serve, tmp_path: Path, fault: dict[str, object]) -> None:
    served = serve("--engine", "echo", "--backoff-s", "0.01", "--config", config(tmp_path, step_s=0.005))
    served.ready_line()
    once = SamplingParams(max_tokens=100, extra_args={"at": 60, "once": str(tmp_path / "once")} | fault)
    with Pool.connect() as pool:
        futures = [pool.submit(f"item {index}", once if index == 2 else LONG) for index in range(6)]
        wait_for(lambda: pool.status().in_flight == 6, "work in hand")
        served.process.terminate()
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        assert not (tmp_path / "once").exists()
        assert all(_is_own(future.result(timeout=30), f"item {index}") for index, future in enumerate(futures))
    assert served.finish()[0] == ExitCode.OK


def test_drain_that_begins_while_the_only_worker_starts_again_finishes_what_waits(serve: Serve, tmp_path: Path) -> None:
    served = serve("--engine", "echo", "--backoff-s", "0.01", "--config", config(tmp_path, start_s=0.3))
    served.ready_line()
    with Pool.connect() as pool:
        os.kill(_pid(pool, 0), signal.SIGKILL)
        wait_for(lambda: pool.status().workers[0].restarts == 1, "the restart")
        futures = [pool.submit(f"item {index}", LONG) for index in range(6)]
        wait_for(lambda: pool.status().backlog == 6, "items that wait")
        served.process.terminate()
        assert all(_is_own(future.result(timeout=30), f"item {index}") for index, future in enumerate(futures))
    assert served.finish()[0] == ExitCode.OK


def test_drain_at_its_limit_with_no_worker_left_returns_the_rest(serve: Serve, tmp_path: Path) -> None:
    gate = tmp_path / "shut"
    served = serve("--engine", "echo", "--drain-timeout-s", "0.3", "--backoff-s", "0.01", env=gated(tmp_path, gate))
    served.ready_line()
    with Pool.connect() as pool:
        gate.touch()
        os.kill(_pid(pool, 0), signal.SIGKILL)
        wait_for(lambda: pool.status().workers[0].restarts == 1, "the restart")
        future = pool.submit("item", LONG)
        wait_for(lambda: pool.status().backlog == 1, "an item that waits")
        served.process.terminate()
        error = future.result(timeout=30).error
    assert error is not None
    assert error.code is Code.DRAINING
    assert served.finish()[0] == ExitCode.DRAIN_LIMIT


def test_batch_of_a_dead_worker_runs_in_another_one() -> None:
    with Pool(engine="echo", workers=2, step_s=0.005, batch_size=4, batch_timeout_s=0.05) as pool:
        futures = [pool.submit(f"item {index}", LONG) for index in range(8)]
        wait_for(lambda: [worker.in_flight for worker in pool.status().workers] == [4, 4], "a batch for each")
        os.kill(_pid(pool, 0), signal.SIGKILL)
        outputs = [future.result(timeout=30) for future in futures]
    assert all(_is_own(output, f"item {index}") for index, output in enumerate(outputs))
    assert sorted(output.attempts for output in outputs) == [1] * 4 + [2] * 4


def test_worker_that_is_stopped_in_the_shutdown_is_killed_at_its_limit(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2", "--shutdown-timeout-s", "0.3")
    served.ready_line()
    with Pool.connect() as pool:
        os.kill(_pid(pool, 0), signal.SIGSTOP)
    served.process.terminate()
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert "killing them" in stderr


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

"""Workers that die while they work: every item still ends exactly once, the pool heals, a killer is told from its neighbours."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from conftest import is_alive, kill_when, wait_for

from enginepool import Code, EnginePoolWarning, Output, Pool, PoolLost, PoolState, SamplingParams, WorkerState

FIVE = SamplingParams(max_tokens=5)


def _generate_while_killing(pool: Pool, count: int, *pids: int, number: signal.Signals = signal.SIGKILL) -> list[Output]:
    """Run `count` items and signal the processes once a quarter of the items has ended."""
    base = pool.status().finished
    killer = kill_when(lambda: pool.status().finished - base >= count // 4, "a quarter of the results", *pids, number=number)
    outputs = pool.generate_many([f"item {index:04}" for index in range(count)], SamplingParams(max_tokens=40))
    killer.join()
    return outputs


def _assert_whole(outputs: list[Output]) -> None:
    assert all(output.ok for output in outputs), [str(output.error) for output in outputs if not output.ok]
    assert [output.prompt for output in outputs] == [f"item {index:04}" for index in range(len(outputs))]
    assert all(str(output.text).startswith(f"item {index:04}") for index, output in enumerate(outputs))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["SIGKILL", "SIGSEGV"])
def test_worker_killed_mid_batch_loses_nothing_and_comes_back(number: signal.Signals) -> None:
    with Pool(engine="echo", workers=2, step_s=0.002, max_num_seqs=8) as pool:
        victim = pool.status().workers[0].pid
        assert victim is not None
        outputs = _generate_while_killing(pool, 80, victim, number=number)
        _assert_whole(outputs)
        assert max(output.attempts for output in outputs) == 2
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")
        worker = pool.status().workers[0]
        assert (worker.restarts, worker.state) == (1, WorkerState.READY)
        assert number.name in str(worker.last_exit)
        assert worker.pid != victim


def test_both_workers_killed_at_once_lose_nothing() -> None:
    with Pool(engine="echo", workers=2, step_s=0.002, max_num_seqs=8) as pool:
        victims = [worker.pid for worker in pool.status().workers if worker.pid]
        _assert_whole(_generate_while_killing(pool, 80, *victims))


@pytest.mark.parametrize("fault", ["exit", "raise", "segfault", "miscount"])
def test_a_fault_that_happens_once_is_not_held_against_the_item(tmp_path: Path, fault: str) -> None:
    extra = {"fault": fault, "at": 3, "once": str(tmp_path / "happened")}
    with Pool(engine="echo", workers=2, step_s=0.001, max_num_seqs=8) as pool:
        params = [SamplingParams(max_tokens=10, extra_args=extra if index == 7 else None) for index in range(20)]
        outputs = pool.generate_many([f"item {index:04}" for index in range(20)], params)
        _assert_whole(outputs)
        assert outputs[7].attempts == 2
        assert sum(worker.restarts for worker in pool.status().workers) <= 1


def test_miscounting_engine_names_both_numbers(tmp_path: Path) -> None:
    extra = {"fault": "miscount", "at": 3, "once": str(tmp_path / "happened")}
    with Pool(engine="echo", workers=1, step_s=0.001) as pool:
        assert pool.generate("x", SamplingParams(max_tokens=10, extra_args=extra)).ok
        last_exit = str(pool.status().workers[0].last_exit)
    assert "was given 1 items and returned 0" in last_exit


@pytest.mark.parametrize(
    ("fault", "at", "told", "max_deaths"),
    [
        pytest.param("exit", 0, "exited with code 9 while the engine was taking this item in", 2, id="exits on admission"),
        pytest.param("kill", 0, "was killed by SIGKILL", 2, id="SIGKILL on admission"),
        pytest.param("raise", 0, "exited with code 70 after RuntimeError: the script raises here", 2, id="raises on admission"),
        pytest.param("exit", 1, "exited with code 9 while this item ran alone in it", 7, id="exits at its first token"),
        pytest.param("exit", 5, "exited with code 9 while this item ran alone in it", 7, id="exits at its fifth token"),
        pytest.param("segfault", 5, "was killed by SIGSEGV", 7, id="segfaults at its fifth token"),
        pytest.param("kill", 5, "was killed by SIGKILL", 7, id="SIGKILL at its fifth token"),
    ],
)
def test_poison_item_is_convicted_and_its_neighbours_live(fault: str, at: int, told: str, max_deaths: int) -> None:
    """At most 2 worker deaths where the flight recorder names the item, 2 + log2 40 where it can not."""
    with Pool(engine="echo", workers=2, step_s=0.001, max_num_seqs=8) as pool:
        killer = SamplingParams(max_tokens=10, extra_args={"fault": fault, "at": at})
        params = [killer if index == 17 else SamplingParams(max_tokens=10) for index in range(40)]
        with pytest.warns(EnginePoolWarning, match="1 of 40 items failed"):
            outputs = pool.generate_many([f"item {index:04}" for index in range(40)], params)
        assert [output.index for output in outputs if not output.ok] == [17]
        error = outputs[17].error
        assert error is not None
        assert error.code is Code.WORKER_LOST
        assert told in error.message
        assert f"{outputs[17].attempts} attempts" in error.message
        assert outputs[17].attempts <= max_deaths
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")
        assert sum(worker.restarts for worker in pool.status().workers) <= max_deaths


def test_pool_fails_with_a_reason_once_no_worker_can_be_had() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, max_restarts=0) as pool:
        pid = pool.status().pid
        future = pool.submit("killer", SamplingParams(max_tokens=10, extra_args={"fault": "exit", "at": 2}))
        error = future.result(timeout=20).error
        assert error is not None
        assert error.code is Code.POOL_LOST
        assert "exited with code 9" in error.message
        wait_for(lambda: not is_alive(pid), "the dispatcher's end")
        with pytest.raises(PoolLost):
            pool.generate("too late")


def test_one_worker_given_up_leaves_a_degraded_pool() -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, max_restarts=0) as pool:
        victim = pool.status().workers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: pool.status().state is PoolState.DEGRADED, "the pool's degradation")
        wait_for(lambda: pool.status().workers[0].state is WorkerState.FAILED, "the worker to be given up")
        assert "worker 0" in str(pool.status().reason)
        assert pool.generate("still served", SamplingParams(max_tokens=5)).worker == 1


def test_client_that_vanishes_has_its_items_aborted() -> None:
    import subprocess
    import sys

    with Pool(engine="echo", workers=1, step_s=0.01) as pool:
        script = (
            "import sys, time; from enginepool import Pool, SamplingParams\n"
            "pool = Pool.connect(sys.argv[1])\n"
            "pool.submit('endless', SamplingParams(max_tokens=10**7)); time.sleep(600)"
        )
        client = subprocess.Popen([sys.executable, "-c", script, pool.endpoint])
        wait_for(lambda: pool.status().in_flight == 1, "the client's item")
        assert pool.status().clients == 2
        client.kill()
        client.wait()
        wait_for(lambda: pool.status().in_flight == 0, "the abort")
        assert pool.status().clients == 1


def test_full_backlog_is_refused_as_retryable_and_many_waits() -> None:
    from enginepool import Overloaded

    with Pool(engine="echo", workers=1, step_s=0.001, max_num_seqs=2, max_backlog_items=4) as pool:
        futures = [pool.submit(f"item {index}", SamplingParams(max_tokens=30)) for index in range(30)]
        kinds = [type(future.exception(timeout=20)) for future in futures]
        assert Overloaded in kinds
        assert kinds[0] is type(None)
        outputs = pool.generate_many([f"item {index:04}" for index in range(100)], SamplingParams(max_tokens=10))
        _assert_whole(outputs)


def test_several_poison_items_do_not_use_up_the_restart_budget() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, max_num_seqs=8) as pool:
        killer = SamplingParams(max_tokens=10, extra_args={"fault": "exit", "at": 3})
        params = [killer if index % 30 == 7 else SamplingParams(max_tokens=10) for index in range(120)]
        with pytest.warns(EnginePoolWarning, match=r"4 of 120 items failed \(4 worker_lost\)"):
            outputs = pool.generate_many([f"item {index:04}" for index in range(120)], params)
        assert [output.index for output in outputs if not output.ok] == [7, 37, 67, 97]


def test_poison_alone_is_convicted_even_with_the_budget_of_its_own_deaths() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, max_restarts=2) as pool:
        killer = SamplingParams(max_tokens=10, extra_args={"fault": "exit", "at": 3})
        with pytest.warns(EnginePoolWarning, match="3 worker_lost"):
            outputs = pool.generate_many(["killer", "good", "killer", "good", "killer"], [killer, FIVE, killer, FIVE, killer])
        assert [output.ok for output in outputs] == [False, True, False, True, False]
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")


def test_broken_worker_is_given_up_and_no_item_for_it() -> None:
    """Whatever worker 0 takes in kills it; everything runs in the other one."""
    broken = SamplingParams(max_tokens=5, extra_args={"fault": "exit", "at": 0, "worker": 0})
    with Pool(engine="echo", workers=2, step_s=0.002, max_num_seqs=4, max_restarts=3) as pool:
        outputs = pool.generate_many([f"item {index:04}" for index in range(60)], broken)
        assert [str(output.error) for output in outputs if not output.ok] == []
        assert {output.worker for output in outputs} == {1}


def test_worker_that_can_not_be_started_again_is_given_up_and_the_pool_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temp folder has vanished: the others serve, and the reason is told."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with Pool(engine="echo", workers=2, step_s=0.001, max_restarts=1, backoff_s=0.01) as pool:
        shutil.rmtree(folder)
        victim = pool.status().workers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: pool.status().workers[0].state is WorkerState.FAILED, "the worker to be given up")
        assert "could not be started: [Errno 2] No such file or directory" in str(pool.status().reason)
        assert pool.generate("still served", FIVE).worker == 1

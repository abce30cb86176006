"""Workers that live and do nothing: found by what they achieve, stacks in the log, items run elsewhere; the slow are let be."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve, is_alive, wait_for

from enginepool import Code, EnginePoolWarning, Output, Pool, PoolState, SamplingParams

MUTE: dict[str, Any] = {"heartbeat_s": 0.1, "mute_timeout_s": 1.5}


def _faulty(fault: str, at: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=20, extra_args={"fault": fault, "at": at, **more})


def _run_beside(pool: Pool, params: SamplingParams) -> tuple[Output, list[Output]]:
    """Run one item with these params in the middle of ten others."""
    futures = [pool.submit(f"item {index}", params if index == 4 else SamplingParams(max_tokens=20)) for index in range(11)]
    outputs = [future.result(timeout=60) for future in futures]
    return outputs.pop(4), outputs


def _last_exits(pool: Pool) -> list[str]:
    return [worker.last_exit for worker in pool.status().workers if worker.last_exit]


def test_step_that_never_returns_is_a_stall_with_stacks_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, stall_timeout_s=1.0) as pool:
        output, others = _run_beside(pool, _faulty("hang", once=str(tmp_path / "once")))
        assert output.ok
        assert output.attempts == 2
        assert all(other.ok for other in others)
        (exit_text,) = _last_exits(pool)
        assert exit_text.startswith("was killed, for it hangs: no token and no result for 1 s with ")
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")
    log = capfd.readouterr().err
    assert "its stacks follow (1 process asked)" in log
    assert "echo_faults.py" in log
    assert "in misbehave" in log


def test_engine_that_spins_in_empty_steps_is_a_stall(tmp_path: Path) -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, stall_timeout_s=1.0) as pool:
        output, others = _run_beside(pool, _faulty("spin", once=str(tmp_path / "once")))
        assert output.ok
        assert all(other.ok for other in others)
        assert "no token and no result for 1 s" in _last_exits(pool)[0]


def test_stopped_worker_is_killed_at_the_silence_limit_and_its_late_answers_change_nothing() -> None:
    with Pool(engine="echo", workers=2, step_s=0.005, max_num_seqs=8, **MUTE) as pool:
        victim = pool.status().workers[0].pid
        assert victim is not None
        futures = [pool.submit(f"item {index:04}", SamplingParams(max_tokens=40)) for index in range(40)]
        wait_for(lambda: pool.status().workers[0].in_flight, "work in hand")
        os.kill(victim, signal.SIGSTOP)
        outputs = [future.result(timeout=60) for future in futures]
        assert all(output.ok for output in outputs)
        assert [str(output.text)[:9] for output in outputs] == [f"item {index:04}" for index in range(40)]
        (told,) = _last_exits(pool)
        assert re.fullmatch(r"was killed, for it hangs: no heartbeat for \d\.\d s \(mute_timeout_s\), and no processor time used", told)
        assert not is_alive(victim)


def test_worker_that_goes_on_before_the_limit_is_left_untouched() -> None:
    with Pool(engine="echo", workers=1, step_s=0.005, heartbeat_s=0.1, mute_timeout_s=20) as pool:
        victim = pool.status().workers[0].pid
        assert victim is not None
        future = pool.submit("patient", SamplingParams(max_tokens=100))
        wait_for(lambda: pool.status().workers[0].in_flight, "work in hand")
        os.kill(victim, signal.SIGSTOP)
        late = pool.submit("late", SamplingParams(max_tokens=5))
        assert not late.done()
        os.kill(victim, signal.SIGCONT)
        assert [future.result(timeout=30).attempts, late.result(timeout=30).attempts] == [1, 1]
        assert (pool.status().workers[0].pid, pool.status().workers[0].restarts) == (victim, 0)


def test_silent_worker_gets_no_new_work() -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, heartbeat_s=0.1, mute_timeout_s=20) as pool:
        stopped = pool.status().workers[0].pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        wait_for(
            lambda: all(pool.generate("x", SamplingParams(max_tokens=1), timeout_s=1).ok for _ in range(20)), "work for the other only"
        )
        os.kill(stopped, signal.SIGCONT)


def test_heartbeats_that_end_are_found_out(tmp_path: Path) -> None:
    """The engine's thread still works; but nobody could tell whether it will answer."""
    with Pool(engine="echo", workers=2, step_s=0.001, **MUTE) as pool:
        output, others = _run_beside(pool, _faulty("mute", once=str(tmp_path / "once")))
        assert output.ok
        assert all(other.ok for other in others)
        wait_for(lambda: _last_exits(pool), "the kill")
        assert "no heartbeat for " in _last_exits(pool)[0]


def test_admission_that_never_ends_costs_its_item_and_one_worker() -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, admit_timeout_s=1.0, heartbeat_s=0.1) as pool:
        with pytest.warns(EnginePoolWarning, match="1 of 11 items failed"):
            outputs = pool.generate_many(
                [f"item {index}" for index in range(11)],
                [_faulty("hang", at=0) if index == 4 else SamplingParams(max_tokens=20) for index in range(11)],
            )
        error = outputs.pop(4).error
        assert error is not None
        assert error.code is Code.TIMEOUT
        assert "taking one item in for 1 s (admit_timeout_s)" in error.message
        assert "1 worker death, 1 attempt" in error.message
        assert all(output.ok for output in outputs)
        assert len(_last_exits(pool)) == 1


@pytest.mark.parametrize("fault", ["sleep", "freeze"])
def test_long_admission_is_no_hang_even_with_the_interpreter_held(fault: str) -> None:
    """A schema that compiles for long: neither the silence limit nor the stall limit counts in an admission."""
    limits: dict[str, Any] = MUTE | {"stall_timeout_s": 1.0, "admit_timeout_s": 30.0}
    with Pool(engine="echo", workers=2, step_s=0.001, **limits) as pool:
        output, others = _run_beside(pool, _faulty(fault, at=0, for_s=3.0))
        assert output.ok
        assert {output.attempts for output in [output, *others]} == {1}
        assert _last_exits(pool) == []


def test_worker_that_goes_on_in_the_last_moment_is_pardoned_and_nobody_is_convicted(capfd: pytest.CaptureFixture[str]) -> None:
    """One admission takes longer than the limit, the next one begins before the kill."""
    with Pool(engine="echo", workers=1, step_s=0.001, admit_timeout_s=1.0) as pool:
        futures = [pool.submit(f"slow {seconds}", _faulty("sleep", at=0, for_s=seconds)) for seconds in (1.6, 0.8)]
        assert [future.result(timeout=30).attempts for future in futures] == [1, 1]
        assert _last_exits(pool) == []
    assert "goes on after all, and is let be" in capfd.readouterr().err


def test_interpreter_held_for_ever_is_silence(tmp_path: Path) -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, **MUTE) as pool:
        output, others = _run_beside(pool, _faulty("deadlock", once=str(tmp_path / "once")))
        assert output.ok
        assert all(other.ok for other in others)
        assert "no heartbeat for " in _last_exits(pool)[0]


def test_long_generation_is_no_hang() -> None:
    with Pool(engine="echo", workers=1, step_s=0.05, stall_timeout_s=0.5, **MUTE) as pool:
        assert pool.generate("slow", SamplingParams(max_tokens=60)).attempts == 1
        assert _last_exits(pool) == []


@pytest.mark.parametrize("fault", ["starve", "block"])
def test_item_that_the_engine_puts_aside_costs_itself_and_one_worker(fault: str) -> None:
    """As a schema that never ends: overtaken by others, or blocked with nobody else there."""
    with Pool(engine="echo", workers=1, step_s=0.005, stall_timeout_s=1.0) as pool:
        doomed = pool.submit("doomed", _faulty(fault, at=1))
        later = [pool.submit(f"later {index}", SamplingParams(max_tokens=20)) for index in range(5)]
        assert all(future.result(timeout=20).ok for future in later)
        busy = pool.submit("busy", SamplingParams(max_tokens=400)) if fault == "starve" else None
        error = doomed.result(timeout=20).error
        assert error is not None
        assert error.code is Code.TIMEOUT
        assert "no token for 1 s (stall_timeout_s), though its engine was free to go on" in error.message
        assert busy is None or busy.result(timeout=20).attempts == 2
        wait_for(lambda: _last_exits(pool), "the end of the engine")
        assert "exited with code 70 after EngineBroken: an item got no token" in _last_exits(pool)[0]


def test_item_that_hangs_every_engine_is_convicted_and_its_neighbours_live() -> None:
    with Pool(engine="echo", workers=2, step_s=0.001, stall_timeout_s=0.5) as pool:
        output, others = _run_beside(pool, _faulty("hang"))
        assert output.error is not None
        assert output.error.code is Code.WORKER_LOST
        assert "hangs: no token and no result for 0.5 s" in output.error.message
        assert all(other.ok for other in others)
        wait_for(lambda: pool.status().state is PoolState.READY, "the pool's recovery")


def test_deadline_ends_an_item_in_a_hung_engine() -> None:
    with Pool(engine="echo", workers=1, step_s=0.001, stall_timeout_s=60) as pool:
        future = pool.submit("stuck", _faulty("hang"), deadline_s=0.5)
        error = future.result(timeout=10).error
        assert error is not None
        assert error.code is Code.DEADLINE_EXCEEDED
        assert pool.status().workers[0].in_flight == 1
        for pid in [worker.pid for worker in pool.status().workers if worker.pid]:
            os.kill(pid, signal.SIGKILL)


def test_dispatcher_that_was_stopped_kills_nobody_when_it_wakes(serve: Serve) -> None:
    served = serve("--engine", "echo", "--workers", "2", "--heartbeat-s", "0.1", "--mute-timeout-s", "0.5", "--stall-timeout-s", "0.5")
    served.ready_line()
    with Pool.connect() as pool:
        pids = [worker.pid for worker in pool.status().workers]
        os.kill(served.pid, signal.SIGSTOP)
        wait_for(lambda: _state_of(served.pid) == "T", "the stop")
        _let_seconds_pass(3)
        os.kill(served.pid, signal.SIGCONT)
        assert pool.generate("awake again", SamplingParams(max_tokens=5)).ok
        _let_seconds_pass(1)
        status = pool.status()
    assert ([worker.pid for worker in status.workers], [worker.restarts for worker in status.workers]) == (pids, [0, 0])


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _let_seconds_pass(seconds: float) -> None:
    """Time itself is what this is about: a dispatcher that stands still for longer than its limits."""
    from threading import Event

    Event().wait(seconds)

"""Clocks that step, stop or count from elsewhere, in one process of a pool: stamps keep their order, durations stay true."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Serve, wait_for, worker_pids
from surroundings import customized

from enginepool import EnginePoolWarning, Output, Pool, SamplingParams

STAMPS = ("submitted", "received", "leased", "arrived", "queued", "scheduled", "first_token", "last_token", "finished", "delivered")
ONE_WORKER_ONLY = """
import os
try:
    os.close(os.open({path!r}, os.O_CREAT | os.O_EXCL))
    is_chosen = True
except FileExistsError:
    is_chosen = False
"""
STEPPED = """
import os, time
_time = time.time
time.time = lambda: _time() - 30 * os.path.exists({path!r})
"""
FAR_ORIGIN = """
if is_chosen and 'MOVED' not in os.environ:
    import ctypes
    if ctypes.CDLL(None).unshare(0x80):
        raise OSError('no time namespace')
    with open('/proc/self/timens_offsets', 'w') as file:
        file.write('monotonic 1000 0')
    os.environ['MOVED'] = '1'
    os.execv(sys.executable, sys.orig_argv)
"""


def _assert_true_stamps(outputs: list[Output], began: float) -> None:
    """All stamps are there, in order, and within the call."""
    ended = time.time()
    for output in outputs:
        stamps = [getattr(output.timings, name) for name in STAMPS]
        assert None not in stamps
        assert stamps == sorted(stamps)
        assert began - 0.1 <= stamps[0] <= stamps[-1] <= ended + 0.1


def _run_on_both(pool: Pool) -> None:
    began = time.time()
    outputs = [future.result(timeout=20) for future in [pool.submit(f"item {n}", SamplingParams(max_tokens=20)) for n in range(40)]]
    assert {output.worker for output in outputs} == {0, 1}
    _assert_true_stamps(outputs, began)


def test_wall_clock_that_steps_in_one_worker(serve: Serve, tmp_path: Path) -> None:
    mark = tmp_path / "step now"
    code = ONE_WORKER_ONLY.format(path=str(tmp_path / "chosen")) + "if is_chosen:\n" + _indented(STEPPED.format(path=str(mark)))
    serve("--engine", "echo", "--workers", "2", env=customized(tmp_path, worker=code)).ready_line()
    with Pool.connect() as pool:
        mark.touch()
        _run_on_both(pool)


def test_wall_clock_that_steps_in_the_dispatcher_is_told_as_drift(serve: Serve, tmp_path: Path) -> None:
    mark = tmp_path / "step now"
    serve("--engine", "echo", "--workers", "2", env=customized(tmp_path, everywhere=STEPPED.format(path=str(mark)))).ready_line()
    with Pool.connect() as pool:
        assert abs(pool.status().clock_drift_s) < 1
        mark.touch()
        _run_on_both(pool)
        assert round(pool.status().clock_drift_s) == -30


def _needs_time_namespaces() -> None:
    """A child tries it: the change can not be undone."""
    code = "import ctypes, os; os._exit(ctypes.CDLL(None).unshare(0x80) != 0 or not os.access('/proc/self/timens_offsets', os.W_OK))"
    if subprocess.run([sys.executable, "-c", code]).returncode:
        pytest.skip("no time namespace can be made here")


def test_monotonic_clock_of_another_origin_in_one_worker(serve: Serve, tmp_path: Path) -> None:
    _needs_time_namespaces()
    code = ONE_WORKER_ONLY.format(path=str(tmp_path / "chosen")) + FAR_ORIGIN
    serve("--engine", "echo", "--workers", "2", env=customized(tmp_path, worker=code)).ready_line()
    with Pool.connect() as pool:
        origins = {Path(f"/proc/{pid}/ns/time").readlink().name for pid in worker_pids(pool)}
        assert len(origins) == 2
        _run_on_both(pool)


def test_monotonic_clock_of_another_origin_in_the_whole_pool(serve: Serve) -> None:
    _needs_time_namespaces()
    serve("--engine", "echo", "--workers", "2", preexec_fn=_enter_far_origin).ready_line()
    with Pool.connect() as pool:
        assert Path(f"/proc/{pool.status().pid}/ns/time").readlink() != Path("/proc/self/ns/time").readlink()
        _run_on_both(pool)


def test_worker_that_was_stopped_has_its_pause_in_the_durations() -> None:
    with Pool(engine="echo", workers=1, step_s=0.01) as pool:
        began = time.time()
        future = pool.submit("paused", SamplingParams(max_tokens=20))
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        victim = worker_pids(pool)[0]
        os.kill(victim, signal.SIGSTOP)
        wait_for(lambda: time.time() - began > 1, "a pause")
        os.kill(victim, signal.SIGCONT)
        output = future.result(timeout=20)
        _assert_true_stamps([output], began)
        assert (output.timings.e2e_s or 0) > 0.9


def test_items_that_did_not_get_far_have_the_stamps_they_reached() -> None:
    with Pool(engine="echo", workers=1, step_s=0.01, max_num_seqs=1) as pool:
        began = time.time()
        running = pool.submit("aborted while it runs", SamplingParams(max_tokens=100_000))
        wait_for(lambda: pool.status().workers[0].running == 1, "one running")
        late = pool.submit("waits for ever", SamplingParams(max_tokens=5), deadline_s=0.2)
        with pytest.warns(EnginePoolWarning):
            refused, aborted = pool.generate_many(["", "x"], SamplingParams(max_tokens=5), timeout_s=0.3)
        running.cancel()
        reached = {
            name: _reached(output, began)
            for name, output in (("late", late.result(timeout=20)), ("refused", refused), ("aborted", aborted))
        }
    assert reached["late"][:2] == ["submitted", "received"]
    assert reached["refused"] == ["submitted", "received", "leased", "delivered"]
    assert reached["aborted"] == ["submitted", "delivered"]


def _reached(output: Output, began: float) -> list[str]:
    """The stamps that an output without a result has; they are in order and within the call."""
    assert output.error is not None
    told = {name: getattr(output.timings, name) for name in STAMPS if getattr(output.timings, name) is not None}
    assert list(told.values()) == sorted(told.values())
    assert began - 0.1 <= told["submitted"] <= told["delivered"] <= time.time() + 0.1
    assert (output.timings.ttft_s, output.timings.tpot_s) == (None, None)
    return list(told)


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.strip().splitlines())


def _enter_far_origin() -> None:
    """Run before exec, which puts the process and what it starts into the namespace."""
    if ctypes.CDLL(None).unshare(0x80):
        raise OSError("no time namespace")
    Path("/proc/self/timens_offsets").write_text("monotonic 1000 0")

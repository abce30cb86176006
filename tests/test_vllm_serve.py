"""`serve` with real vLLM: its flags, the embedded model, refused starts, the engine core in its own process, drain and orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Serve, is_alive, tree_of, wait_for

from enginepool import EngineMissing, Pool, PoolState, SamplingParams, SettingsError, StartError
from enginepool.demo.model import ensure_model
from enginepool.errors import ExitCode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LENGTH = 80
SMALL_KV = ["--kv-cache-budget-bytes", str(256 << 20)]
LONG = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
CORE_ARGS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "kv_cache_budget_bytes": 256 << 20}


def test_vllm_flags_after_the_dashes_and_a_drain_by_group_signal(serve: Serve) -> None:
    served = serve("--workers", "1", *SMALL_KV, "--", "--max-model-len", "512", "--max-num-seqs=4", "--enforce-eager")
    line = json.loads(served.ready_line())
    assert line["model"] == "SmolLM2-135M-Instruct"
    with Pool.connect(line["endpoint"]) as pool:
        assert pool.generate([1] * 511, SamplingParams(max_tokens=5, ignore_eos=True)).ok
        assert not pool.generate([1] * 512, SamplingParams(max_tokens=5)).ok
        futures = [pool.submit(f"Story {index}:", LONG) for index in range(6)]
        wait_for(lambda: pool.status().workers[0].running == 4, "four running of six in hand", 60)
        for pid in reversed(tree_of(served.pid)):
            os.kill(pid, signal.SIGTERM)
        assert [len(future.result(timeout=120).token_ids) for future in futures] == [LENGTH] * 6
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert "no model was named: using the embedded SmolLM2-135M-Instruct" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        pytest.param(["--", "--max-modle-len", "5"], ExitCode.USAGE, "--max-modle-len", id="unknown flag"),
        pytest.param(["--", "--max-num-seqs", "many"], ExitCode.USAGE, "max-num-seqs", id="bad value"),
        pytest.param(["--", "--max-model-len", "10000000"], ExitCode.START_FAILED, "max_model_len", id="window too large"),
    ],
)
def test_bad_vllm_flags_are_refused_before_weights_load(serve: Serve, arguments: list[str], code: ExitCode, text: str) -> None:
    served = serve("--workers", "2", *SMALL_KV, *arguments)
    line = json.loads(served.ready_line())
    got, stderr = served.finish()
    assert got == line["exit_code"] == code
    assert text in line["error"]
    assert "Loading weights" not in stderr
    assert "again" not in stderr


def test_unknown_engine_argument_is_named() -> None:
    with pytest.raises(SettingsError, match="max_modle_len"):
        Pool(workers=1, max_modle_len=5)


def test_torn_weights_fail_with_the_cause_and_no_retry(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in ensure_model().iterdir():
        (model / path.name).symlink_to(path)
    weights = model / "model.safetensors"
    weights.unlink()
    weights.write_bytes((ensure_model() / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(StartError, match=r"model\.safetensors is not a safetensors file, or cut short") as caught:
        Pool(model, workers=1, enforce_eager=True, max_model_len=256, kv_cache_budget_bytes=256 << 20)
    assert not isinstance(caught.value, EngineMissing)


@pytest.mark.timeout(600)
def test_engine_core_in_its_own_process(fresh_run_dir: Path) -> None:
    """Timings hold there too, its death is healed, its stop is found out, a killed dispatcher leaves nothing, shared memory included."""
    shared_memory = set(os.listdir("/dev/shm"))
    with Pool(workers=1, engine_core="mp", stall_timeout_s=10, **CORE_ARGS) as pool:
        outputs = pool.generate_many([f"Item {index}:" for index in range(16)], SamplingParams(max_tokens=20, ignore_eos=True))
        for output in outputs:
            timings = output.timings
            stamps = [timings.arrived, timings.queued, timings.scheduled, timings.first_token, timings.last_token, timings.finished]
            told = [stamp for stamp in stamps if stamp is not None]
            assert len(told) == 6
            assert told == sorted(told)
        _assert_core_death_is_healed(pool)
        _assert_stopped_core_is_found_out(pool)
        _assert_killed_dispatcher_leaves_nothing(pool)
    wait_for(lambda: not set(os.listdir("/dev/shm")) - shared_memory, "the removal of shared memory", 10)


def _assert_core_death_is_healed(pool: Pool) -> None:
    worker = pool.status().workers[0]
    futures = [pool.submit(f"Item {index}:", LONG) for index in range(4)]
    wait_for(lambda: pool.status().workers[0].running == 4, "four running", 60)
    for core in _engine_cores(worker.pid):
        core.kill()
    assert [len(future.result(timeout=200).token_ids) for future in futures] == [LENGTH] * 4
    assert pool.status().workers[0].restarts == 1
    assert pool.status().state is PoolState.READY


def _assert_stopped_core_is_found_out(pool: Pool) -> None:
    """The worker lives and sends its heartbeats; only that nothing is computed tells."""
    for index in range(4):
        pool.submit(f"Item {index}:", LONG)
    wait_for(lambda: pool.status().workers[0].running == 4, "four running", 60)
    for core in _engine_cores(pool.status().workers[0].pid):
        core.suspend()
    wait_for(lambda: "hangs: no token and no result for 10 s" in str(pool.status().workers[0].last_exit), "the kill", 60)


def _assert_killed_dispatcher_leaves_nothing(pool: Pool) -> None:
    """In the middle of the next start, as soon as its engine core is there."""
    wait_for(lambda: _engine_cores(pool.status().workers[0].pid), "the next engine core", 120)
    tree = tree_of(pool.status().pid)
    bystander = subprocess.Popen(["sleep", "600"])
    future = pool.submit("lost", LONG)
    os.kill(tree[0], signal.SIGKILL)
    wait_for(lambda: not [pid for pid in tree if is_alive(pid)], "the end of worker and engine core", 5)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert future.exception(timeout=5) is not None


def _engine_cores(worker_pid: int | None) -> list[psutil.Process]:
    """The children of a worker that run an engine core (vLLM titles them so), the resource tracker left out."""
    if worker_pid is None:
        return []
    children = psutil.Process(worker_pid).children(recursive=True)
    return [child for child in children if "EngineCore" in " ".join(child.cmdline())]

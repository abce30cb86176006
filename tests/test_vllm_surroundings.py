"""Real engines in odd surroundings: no network, a mask of one core, OpenMP's variables, a wall clock that steps, no statistics."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Serve, wait_for, worker_pids
from surroundings import config, customized, on_one_core, without_network
from vllm_work import ENGINE_ARGS, GREEDY, KV_BYTES

from enginepool import EnginePoolWarning, Output, Pool, SamplingParams
from enginepool.demo.model import ensure_model
from enginepool.dispatcher.machine import read_machine
from enginepool.errors import ExitCode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SHRUNK = {"OMP_PROC_BIND": "TRUE", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0", "KMP_AFFINITY": "compact", "OMP_NUM_THREADS": "64"}
STEPPED = """
import os, time
_time = time.time
time.time = lambda: _time() - 30 * os.path.exists({path!r})
"""
SECRET = "the prompt nobody may read in a log"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _linked(folder: Path, *names: str) -> None:
    """The embedded model's files, as links."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to(ensure_model() / name)


def _in_cache(home: Path) -> dict[str, str]:
    """The embedded model as the hub's cache holds one; the hub must not be asked."""
    repository = home / "hub" / "models--me--mine"
    _linked(repository / "snapshots" / "abc", *FILES, "generation_config.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}


def _all(*steps: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


def _assert_true_stamps(outputs: list[Output], began: float, names: tuple[str, ...]) -> None:
    for output in outputs:
        stamps = [getattr(output.timings, name) for name in names]
        assert None not in stamps
        assert stamps == sorted(stamps)
        assert began - 0.1 <= stamps[0] <= stamps[-1] <= time.time() + 0.1


def test_cached_model_without_network_under_a_shrunk_mask_and_a_stepping_clock(serve: Serve, tmp_path: Path) -> None:
    """The hub id is in the cache; each worker has its cores, whatever was inherited; stamps keep the pool's clock; no prompt is logged."""
    mark = tmp_path / "step now"
    env = customized(tmp_path, worker=STEPPED.format(path=str(mark))) | _in_cache(tmp_path / "hf") | SHRUNK | {"TERM": "dumb"}
    served = serve(
        *("me/mine", "--workers", "2", "--kv-cache-budget-bytes", str(2 * KV_BYTES), "--config", config(tmp_path, **ENGINE_ARGS)),
        env=env,
        preexec_fn=_all(on_one_core(), without_network(loopback=True)),
    )
    line = json.loads(served.ready_line())
    assert (line["state"], line["model"]) == ("ready", "me/mine")
    with Pool.connect(line["endpoint"]) as pool:
        mark.touch()
        began = time.time()
        outputs = pool.generate_many([SECRET] * 24, SamplingParams(max_tokens=8, ignore_eos=True))
        with pytest.warns(EnginePoolWarning, match="1 of 1 items failed"):
            pool.generate_many([SECRET * 100], GREEDY)
        names = ("submitted", "received", "leased", "arrived", "queued", "scheduled", "first_token", "last_token", "finished", "delivered")
        _assert_true_stamps(outputs, began, names)
        assert {output.worker for output in outputs} == {0, 1}
        tasks = {pid: [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()] for pid in worker_pids(pool)}
        masks = [{frozenset(os.sched_getaffinity(task)) for task in found} for found in tasks.values()]
    allowed = set(read_machine().cpuset or os.sched_getaffinity(0))
    assert [len(mask) for mask in masks] == [1, 1]
    if len(allowed) >= 2:
        assert set.union(*(set(next(iter(mask))) for mask in masks)) == allowed
    served.process.send_signal(signal.SIGTERM)
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert SECRET not in stderr
    assert "\r" not in stderr
    assert served.output[0] == ""


def test_folder_with_a_hub_ids_name_and_no_statistics(serve: Serve, tmp_path: Path) -> None:
    """The folder goes first, a generation config may be missing; without statistics the engine's stamps are empty, the others true."""
    _linked(tmp_path / "me" / "mine", *FILES)
    served = serve(
        *("me/mine", "--kv-cache-budget-bytes", str(KV_BYTES), "--config", config(tmp_path, **ENGINE_ARGS, disable_log_stats=True)),
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")},
        preexec_fn=lambda: os.chdir(tmp_path),
    )
    with Pool.connect(json.loads(served.ready_line())["endpoint"]) as pool:
        began = time.time()
        outputs = pool.generate_many(["Hello"] * 4, [GREEDY, SamplingParams(max_tokens=1), SamplingParams(n=3, max_tokens=4), GREEDY])
        assert [output.error for output in outputs] == [None] * 4
        _assert_true_stamps(outputs, began, ("submitted", "received", "leased", "arrived", "finished", "delivered"))
        for timings in (output.timings for output in outputs):
            assert (timings.queued, timings.scheduled, timings.first_token, timings.last_token) == (None,) * 4
            assert (timings.ttft_s, timings.tpot_s) == (None, None)
        wait_for(lambda: pool.status().workers[0].generation_tokens > 0, "the count of tokens")
    served.process.send_signal(signal.SIGTERM)
    code, stderr = served.finish()
    assert code == ExitCode.OK
    assert "warning: disable_log_stats is set" in stderr

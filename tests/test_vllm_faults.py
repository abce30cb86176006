"""Items that exit, raise and hang inside real vLLM engines: the guilty is found, its neighbours are answered, slow is not dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from vllm_work import ENGINE_ARGS, KV_BYTES

from enginepool import Code, Output, Pool, PoolState, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PROCESSOR = "fault_processor:FaultProcessor"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two real workers with the processor on their path, and limits short enough for a test."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), path]))
    try:
        with Pool(
            workers=2,
            kv_cache_budget_bytes=2 * KV_BYTES,
            logits_processors=[PROCESSOR],
            max_restarts=20,
            stall_timeout_s=8,
            admit_timeout_s=8,
            heartbeat_s=0.5,
            mute_timeout_s=8,
            **ENGINE_ARGS,
        ) as made:
            yield made
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path


def _run_with(pool: Pool, fault: dict[str, Any], count: int = 40) -> tuple[Output, list[Output], int]:
    """Run one item with a fault in a batch; returns its output, the others', and how many workers died meanwhile."""
    wait_for(lambda: pool.status().state is PoolState.READY, "two ready workers", 120)
    before = _restarts(pool)
    good = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    params = [good] * count
    params[count // 2] = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args=fault)
    futures = [pool.submit(f"Item {index}:", one) for index, one in enumerate(params)]
    outputs = [future.result(timeout=300) for future in futures]
    guilty = outputs.pop(count // 2)
    wait_for(lambda: pool.status().state is PoolState.READY, "two ready workers", 120)
    return guilty, outputs, _restarts(pool) - before


def _restarts(pool: Pool) -> int:
    return sum(worker.restarts for worker in pool.status().workers)


def test_item_that_exits_on_admission_costs_two_workers(pool: Pool) -> None:
    guilty, others, num_deaths = _run_with(pool, {"fault": "exit", "at": 0})
    assert guilty.error is not None
    assert guilty.error.code is Code.WORKER_LOST
    assert "exited with code 9 while the engine was taking this item in; it was in 2 worker deaths, 2 attempts" in guilty.error.message
    assert all(output.ok and len(output.token_ids) == 12 for output in others)
    assert num_deaths == 2


def test_item_that_raises_on_admission_costs_itself_only(pool: Pool) -> None:
    guilty, others, num_deaths = _run_with(pool, {"fault": "raise", "at": 0})
    assert guilty.error is not None
    assert guilty.error.code is Code.INVALID_REQUEST
    assert "the processor raises here" in guilty.error.message
    assert all(output.ok for output in others)
    assert num_deaths == 0


def test_item_that_raises_at_its_fifth_token_is_convicted(pool: Pool) -> None:
    guilty, others, num_deaths = _run_with(pool, {"fault": "raise", "at": 5})
    assert guilty.error is not None
    assert guilty.error.code is Code.WORKER_LOST
    assert "exited with code 70 after RuntimeError: the processor raises here while this item ran alone in it" in guilty.error.message
    assert all(output.ok and len(output.token_ids) == 12 for output in others)
    assert num_deaths <= 7


def test_step_that_hangs_is_killed_and_its_items_run_elsewhere(pool: Pool, tmp_path: Path) -> None:
    guilty, others, num_deaths = _run_with(pool, {"fault": "hang", "at": 3, "once": str(tmp_path / "once")}, count=8)
    assert guilty.ok
    assert all(output.ok for output in others)
    assert num_deaths == 1
    assert any("hangs: no token and no result for 8 s" in str(worker.last_exit) for worker in pool.status().workers)


def test_slow_steps_and_a_pause_are_no_hang(pool: Pool) -> None:
    """A step that takes most of the limit, and a worker that is stopped for a moment, are let be."""
    wait_for(lambda: pool.status().state is PoolState.READY, "two ready workers", 120)
    before = _restarts(pool)
    slow = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args={"fault": "sleep", "at": 3, "for_s": 5})
    futures = [pool.submit(f"Item {index}:", slow if index == 2 else SamplingParams(max_tokens=30, ignore_eos=True)) for index in range(4)]
    victim = next(worker.pid for worker in pool.status().workers if worker.pid)
    os.kill(victim, signal.SIGSTOP)
    os.kill(victim, signal.SIGCONT)
    assert [future.result(timeout=120).attempts for future in futures] == [1] * 4
    assert _restarts(pool) == before


def test_long_prompt_computed_in_chunks_is_progress() -> None:
    """Prompts of many chunks yield no token for longer than the limit; the KV cache fills meanwhile."""
    with Pool(
        workers=1, max_model_len=8192, max_num_batched_tokens=128, max_num_seqs=1, kv_cache_budget_bytes=2 * KV_BYTES, stall_timeout_s=2
    ) as pool:
        output = pool.generate({"prompt_token_ids": [(7 * index) % 20_000 + 100 for index in range(3000)]}, SamplingParams(max_tokens=2))
        assert output.ok
        assert (output.timings.ttft_s or 0) > 2
        assert output.attempts == 1

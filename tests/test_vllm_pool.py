"""Two real vLLM workers on the embedded model: the same answers as plain vLLM, honest timings, bad items alone, faults healed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import kill_when, wait_for, worker_pids
from vllm_work import GREEDY, PROMPTS, told_of

from enginepool import EnginePoolWarning, Output, Pool, PoolState, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pool(vllm_pool: Pool) -> Pool:
    """The shared pool under a shorter name."""
    return vllm_pool


@pytest.fixture(autouse=True)
def same_workers(pool: Pool, request: pytest.FixtureRequest) -> Iterator[None]:
    """No test but those that kill may cost a worker."""
    before = worker_pids(pool)
    yield
    if "killed" not in request.node.name:
        assert worker_pids(pool) == before


def test_greedy_answers_equal_plain_vllm(pool: Pool, vllm_reference: list[dict[str, Any]]) -> None:
    outputs = [pool.generate(prompt, GREEDY) for prompt in PROMPTS]
    expected = vllm_reference[: len(PROMPTS)]
    assert [told_of(output) for output in outputs] == expected
    assert [output.usage.completion_tokens for output in outputs] == [len(answer["token_ids"]) for answer in expected]


def test_many_use_both_workers_and_keep_order(pool: Pool) -> None:
    prompts = [f"Number {index}:" for index in range(48)]
    params = [SamplingParams(max_tokens=1 + index % 3 * 20, ignore_eos=True) for index in range(48)]
    outputs = pool.generate_many(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [param.max_tokens for param in params]
    assert {output.worker for output in outputs} == {0, 1}


def _stamps(output: Output) -> list[float | None]:
    timings = output.timings
    names = ("submitted", "received", "leased", "arrived", "queued", "scheduled", "first_token", "last_token", "finished", "delivered")
    return [getattr(timings, name) for name in names]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(max_tokens=20, ignore_eos=True), id="plain"),
        pytest.param(SamplingParams(max_tokens=1), id="one token"),
        pytest.param(SamplingParams(max_tokens=8, n=3, temperature=1.0), id="three samples"),
    ],
)
def test_timings_have_every_stamp_in_order(pool: Pool, params: SamplingParams) -> None:
    outputs = pool.generate_many(["The weather today is"] * 24, params)
    for output in outputs:
        stamps = [stamp for stamp in _stamps(output) if stamp is not None]
        assert len(stamps) == 10
        assert stamps == sorted(stamps)
    tpot = outputs[0].timings.tpot_s
    assert (tpot is None) == (params.max_tokens == 1)
    assert (outputs[0].timings.ttft_s or 0) > 0


def test_none_means_the_models_generation_config(pool: Pool) -> None:
    with pytest.warns(EnginePoolWarning, match="default of 16 tokens"):
        outputs = pool.generate_many(["Tell me a very long story about"] * 8)
    assert max(len(output.token_ids) for output in outputs) == 16


def test_structured_output_matches_its_regex(pool: Pool) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{3}-[0-9]{2}"))
    assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", str(pool.generate("My number is", params).text))


def test_structured_output_is_json_of_its_schema(pool: Pool) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    params = {"temperature": 0, "max_tokens": 40, "structured_outputs": {"json": schema}}
    assert list(json.loads(str(pool.generate("Person:", params).text))) == ["age"]


def test_choice_is_one_of_them(pool: Pool) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["red", "green"]), max_tokens=10)
    assert pool.generate("Stop light:", params).text in ("red", "green")


def test_three_samples_have_their_indexes(pool: Pool) -> None:
    output = pool.generate("Once", SamplingParams(n=3, max_tokens=6, temperature=1.0, ignore_eos=True))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert output.usage.completion_tokens == 18


def test_logprobs_have_the_sampled_token_first(pool: Pool) -> None:
    output = pool.generate("The capital of France is", SamplingParams(max_tokens=3, temperature=0, logprobs=2))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    for token, position in zip(output.token_ids, logprobs, strict=True):
        assert position is not None
        assert position[token].rank == 1
        assert position[token].logprob <= 0
        assert position[token].decoded_token


def test_stop_string_ends_the_text(pool: Pool) -> None:
    output = pool.generate("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=40, stop=[","]))
    assert "," not in str(output.text)
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", ",")


def test_token_ids_give_the_same_as_their_text(pool: Pool) -> None:
    from_text = pool.generate(PROMPTS[0], GREEDY)
    assert from_text.prompt_token_ids is not None
    assert pool.generate(from_text.prompt_token_ids, GREEDY).text == from_text.text


def test_repetition_detection_reaches_the_engine(pool: Pool) -> None:
    detection = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    assert pool.generate("x", {"max_tokens": 8, "repetition_detection": detection}).ok


def test_cancel_frees_the_engine_and_spares_neighbours(pool: Pool) -> None:
    long = SamplingParams(max_tokens=240, ignore_eos=True)
    doomed = [pool.submit(f"doomed {index}", long) for index in range(4)]
    neighbour = pool.submit("neighbour", SamplingParams(max_tokens=30, ignore_eos=True))
    wait_for(lambda: pool.status().in_flight == 5, "all five in flight")
    assert all(future.cancel() for future in doomed)
    assert len(neighbour.result(timeout=60).token_ids) == 30
    wait_for(lambda: pool.status().in_flight == 0, "the abort")


def test_every_thread_stays_on_its_workers_core(pool: Pool) -> None:
    planned = [set(worker.cpus) for worker in pool.status().workers]
    for worker, cpus in zip(pool.status().workers, planned, strict=True):
        for status in Path(f"/proc/{worker.pid}/task").glob("*/status"):
            assert os.sched_getaffinity(int(status.parent.name)) == cpus
    if len(os.sched_getaffinity(0)) >= 2:
        assert not planned[0] & planned[1]


def test_status_has_engine_counts(pool: Pool) -> None:
    pool.generate("count", GREEDY)
    wait_for(lambda: all(worker.running == 0 for worker in pool.status().workers), "idle gauges")
    assert all(worker.generation_tokens > 0 for worker in pool.status().workers)
    assert all(worker.kv_cache_usage is not None for worker in pool.status().workers)


def test_worker_killed_mid_batch_every_item_comes_back_once(pool: Pool) -> None:
    victim = worker_pids(pool)[0]

    base = pool.status().finished
    killer = kill_when(lambda: pool.status().finished > base, "a first result", victim)
    prompts = [f"Item {index}:" for index in range(40)]
    outputs = pool.generate_many(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    killer.join()
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [16] * 40
    assert max(output.attempts for output in outputs) == 2
    wait_for(lambda: pool.status().state is PoolState.READY, "the worker's return", 120)
    assert victim not in worker_pids(pool)
    assert pool.generate("afterwards", GREEDY).ok

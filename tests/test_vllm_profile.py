"""What vLLM's own switches give: profiler scopes of the worker's stages, the details of each step; and what stays as the user set it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm_work import ENGINE_ARGS, KV_BYTES

from enginepool.demo.model import ensure_model
from enginepool.handover import EngineSpec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def _profile(environment: dict[str, str], **engine_args: Any) -> dict[str, Any]:
    spec = EngineSpec(kind="vllm", model=str(ensure_model()), name="m", args=ENGINE_ARGS | engine_args, kv_cache_bytes=KV_BYTES)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_profile.py"))],
        input=msgspec.json.encode(spec),
        capture_output=True,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"} | environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["num_done"] == 3
    return told


def test_scopes_and_step_details_where_vllm_was_asked_for_them() -> None:
    told = _profile({"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}, enable_logging_iteration_details=True)
    assert told["scopes"] == [f"enginepool worker: {stage}" for stage in ("admit", "encode", "pull", "step")]
    first, *rest = told["details"]
    assert (first["num_context_requests"], first["num_generation_requests"]) == (3, 0)
    assert first["num_context_tokens"] >= 6
    assert {(step["num_generation_requests"], step["num_generation_tokens"]) for step in rest} == {(3, 3)}
    assert [step["index"] for step in rest] == sorted({step["index"] for step in rest})
    assert all(step["elapsed_s"] > 0 for step in rest)


def test_no_scopes_and_no_step_details_otherwise() -> None:
    told = _profile({})
    assert (told["scopes"], told["details"]) == ([], [])

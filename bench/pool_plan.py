"""What the pool would give its workers here, for raw engines that are to have exactly the same."""

from __future__ import annotations

import os
from typing import Any, Literal

from enginepool.demo.model import MODEL_NAME, ensure_model
from enginepool.dispatcher.machine import read_machine
from enginepool.dispatcher.placement import PlacementRequest, WorkerPlan, plan_workers
from enginepool.dispatcher.supervisor import child_environment
from enginepool.preflight.dtype import is_bfloat16_slow

DTYPE = "float32" if is_bfloat16_slow() else "bfloat16"
ENGINE_ARGS: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 1024, "enforce_eager": True, "dtype": DTYPE}
"""What every engine of these benchmarks is built with; bfloat16 unless that is slow on this CPU."""


def plans(
    workers: int, engine_core: Literal["auto", "inproc", "mp"] = "inproc", kv_cache_bytes: int | None = None
) -> tuple[WorkerPlan, ...]:
    """Cores, threads, KV bytes and environment of each worker, as the pool plans them; `kv_cache_bytes` is for all together."""
    request = PlacementRequest(workers=workers, engine_core=engine_core, device="cpu", kv_cache_bytes=kv_cache_bytes, environ=os.environ)
    return plan_workers(read_machine(), request).workers


def environment(plan: WorkerPlan) -> dict[str, str]:
    """The environment that the pool gives this worker."""
    return child_environment(plan, os.environ)


def inproc_args(model: str, plan: WorkerPlan) -> dict[str, Any]:
    """`LLM` arguments of an engine with its core in process and the pool's share of KV memory."""
    kv_bytes = plan.kv_cache_bytes
    return {"model": model, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": kv_bytes, **ENGINE_ARGS}


def resolve_model(given: str | None) -> str:
    """The model to run: the one given, or the embedded one, prepared on first use."""
    return given or str(ensure_model(lambda line: print(f"{MODEL_NAME}: {line}", flush=True)))

"""What placement is asked and what it answers; plain frozen structs, shared by the modules that decide a part each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class PlacementRequest(msgspec.Struct, frozen=True):
    """What the settings say about placement; `environ` is the dispatcher's environment.

    `cpu_affinity` is `auto`, `reset`, `inherit` or a core list (`0-3` for all workers, `0-3|4-7` for one group each).
    `kv_cache_bytes` is the total for all workers of a CPU engine; None means `VLLM_CPU_KVCACHE_SPACE` or a share of the memory.
    """

    workers: int | Literal["auto"] = "auto"
    engine: Literal["vllm", "echo"] = "vllm"
    cpu_affinity: str = "auto"
    engine_core: Literal["auto", "inproc", "mp"] = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_cache_bytes: int | None = None
    environ: Mapping[str, str] = {}

    @property
    def ranks(self) -> int:
        """How many engine processes one worker has; an echo engine is always one."""
        return self.tensor_parallel_size * self.pipeline_parallel_size if self.engine == "vllm" else 1


class WorkerPlan(msgspec.Struct, frozen=True):
    """Where one worker runs and with what.

    `cpus` is the mask to set before exec, `num_threads` the computing threads of the whole worker, `devices` the entries of
    `CUDA_VISIBLE_DEVICES`, `numa_node` the one node that holds all `cpus` (None: several or unknown). `kv_cache_bytes` is what
    vLLM takes as `kv_cache_memory_bytes`: every rank allocates that much (None: not a CPU engine). From the inherited environment
    remove `env_unset`, then add `env_set`.
    """

    index: int
    cpus: tuple[int, ...]
    num_threads: int
    devices: tuple[str, ...]
    numa_node: int | None
    kv_cache_bytes: int | None
    engine_core: Literal["inproc", "mp"]
    env_set: dict[str, str]
    env_unset: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True):
    """The plans of all workers, what to warn about once, and in words where each value came from."""

    workers: tuple[WorkerPlan, ...]
    warnings: tuple[str, ...]
    origins: dict[str, str]


class Device(msgspec.Struct, frozen=True):
    """One visible GPU: its name for `CUDA_VISIBLE_DEVICES` and the NUMA node it hangs on."""

    name: str
    numa_node: int | None


class CoreShare(msgspec.Struct, frozen=True):
    """The cores of one worker, and how its ranks divide them."""

    cpus: tuple[int, ...]
    rank_groups: tuple[tuple[int, ...], ...]

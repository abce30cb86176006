"""Build the environment a worker is started with; pure."""

from __future__ import annotations

from collections.abc import Mapping

from enginepool.dispatcher.affinity import BIND_VARIABLE
from enginepool.dispatcher.cpuset import format_groups
from enginepool.dispatcher.devices import VARIABLE as DEVICES_VARIABLE
from enginepool.dispatcher.kv_budget import VARIABLE as KV_VARIABLE
from enginepool.dispatcher.plan import CoreShare

# Each of them narrows a mask behind our back, down to one core per process.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

# Meant for the job that started us; an engine that reads them waits for peers that never come or takes a port of others.
_RANKS_AND_PORTS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE"),
    *("VLLM_PORT", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"),
)


def thread_variables(num_threads: int, ranks: int) -> dict[str, str]:
    """The thread counts of the numeric libraries, for each of the worker's ranks."""
    count = str(max(1, num_threads // ranks))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count)


def tokenizer_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep tokenizers from starting threads of their own, unless the user decided."""
    return {} if "TOKENIZERS_PARALLELISM" in environ else {"TOKENIZERS_PARALLELISM": "false"}


def vllm_variables(engine_core: str) -> dict[str, str]:
    """Where vLLM's engine core runs, and that children are spawned: a fork would copy our sockets and threads."""
    return {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if engine_core == "mp" else "0"}


def bind_variable(share: CoreShare, num_threads: int, index: int) -> dict[str, str]:
    """The explicit core list for a CPU engine with its core in another process, one group per rank.

    vLLM starts and ties one thread per core listed. So where sharing or a quota allows fewer threads the list is shorter, and
    workers that share a set take different cores of it.
    """
    if num_threads >= len(share.cpus):
        return {BIND_VARIABLE: format_groups(share.rank_groups)}
    per_rank = max(1, num_threads // len(share.rank_groups))
    return {BIND_VARIABLE: format_groups(_take(group, per_rank, index * per_rank) for group in share.rank_groups)}


def device_variables(devices: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """The worker's GPUs; indices of our own making count in PCI bus order, so CUDA has to count like that too."""
    chosen = {DEVICES_VARIABLE: ",".join(devices)}
    if DEVICES_VARIABLE not in environ and "CUDA_DEVICE_ORDER" not in environ:
        chosen["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return chosen


def unset_variables(env_set: Mapping[str, str]) -> tuple[str, ...]:
    """What to remove from the inherited environment."""
    return tuple(name for name in (*_BINDING, KV_VARIABLE, BIND_VARIABLE, *_RANKS_AND_PORTS) if name not in env_set)


def _take(group: tuple[int, ...], count: int, start: int) -> list[int]:
    return [group[(start + step) % len(group)] for step in range(min(count, len(group)))]

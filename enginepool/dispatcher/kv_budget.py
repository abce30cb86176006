"""Divide the memory for KV caches among the CPU engines of one machine; pure.

The rule. A stated budget (`kv_cache_bytes`, else `VLLM_CPU_KVCACHE_SPACE` in GiB) is the total of all workers and is divided
evenly. Without one each worker gets the smallest of: half of the memory (cgroup limit or machine, the tighter) ÷ workers; half of
its NUMA node ÷ workers on that node; 4 GiB. A worker with several ranks divides its share among them, since every rank
allocates by itself. The other half is for weights and working memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from enginepool.dispatcher.machine import Machine, NumaNode
from enginepool.dispatcher.plan import CoreShare, PlacementRequest
from enginepool.dispatcher.spread import find_node
from enginepool.errors import SettingsError

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
GIB = 1 << 30
MIB = 1 << 20
SHARE_CAP_BYTES = 4 * GIB
SHARE_MIN_BYTES = 64 * MIB


class KvPlan(msgspec.Struct, frozen=True):
    """KV bytes of each worker's ranks, where they came from in words, and what to warn about."""

    rank_bytes: tuple[int, ...]
    origin: str
    warnings: tuple[str, ...]


def plan_kv(machine: Machine, request: PlacementRequest, shares: Sequence[CoreShare]) -> KvPlan:
    """Decide the KV bytes of CPU engines by the rule above.

    Raises SettingsError for a budget that can't be read, exceeds the memory, or leaves a worker less than 64 MiB.
    """
    stated = _stated_budget(request)
    per_worker, origin = _stated_shares(machine, shares, *stated) if stated else _automatic_shares(machine, shares)
    _check_minimum(per_worker, origin)
    return KvPlan(tuple(share // request.ranks for share in per_worker), origin, _pressure(machine, sum(per_worker)))


def format_bytes(number: int) -> str:
    """`"4.0 GiB"`, or MiB below one GiB."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def _stated_budget(request: PlacementRequest) -> tuple[int, str] | None:
    if request.kv_cache_bytes is not None and request.kv_cache_bytes < 0:
        raise SettingsError(f"kv_cache_budget_bytes is {request.kv_cache_bytes}; give the bytes for all workers together, or leave it out")
    if request.kv_cache_bytes:
        return request.kv_cache_bytes, "kv_cache_budget_bytes"
    budget = 0 if request.kv_cache_bytes == 0 else _parse_gib(request.environ.get(VARIABLE, ""))
    return (budget, VARIABLE) if budget else None


def _parse_gib(text: str) -> int:
    try:
        budget = (float(text) if text.strip() else 0.0) * GIB
    except ValueError:
        budget = math.nan
    if not 0 <= budget < math.inf:
        raise SettingsError(f"{VARIABLE} is {text!r}; give the GiB for all workers together, such as 8, or 0 for automatic")
    return int(budget)


def _memory(machine: Machine) -> tuple[int, str]:
    known = [(machine.memory_limit_bytes, "the cgroup's memory limit"), (machine.memory_total_bytes, "the machine's memory")]
    # Where nothing can be read, a modest guess beats refusing to start.
    return min(((size, words) for size, words in known if size is not None), default=(SHARE_CAP_BYTES, "memory unreadable, assumed"))


def _automatic_shares(machine: Machine, shares: Sequence[CoreShare]) -> tuple[tuple[int, ...], str]:
    memory, source = _memory(machine)
    even = min(SHARE_CAP_BYTES, memory // 2 // len(shares))
    per_worker = tuple(min(even, (node.memory_bytes or memory) // 2 // workers) for node, workers in _nodes_of(machine, shares))
    rule = f"half of {format_bytes(memory)} ({source}) and of the NUMA node ÷ workers"
    return per_worker, f"auto: {rule}, at most {format_bytes(SHARE_CAP_BYTES)} each"


def _stated_shares(machine: Machine, shares: Sequence[CoreShare], budget: int, name: str) -> tuple[tuple[int, ...], str]:
    memory, source = _memory(machine)
    if budget > memory:
        asked = f"{name} asks for {format_bytes(budget)} of KV cache"
        raise SettingsError(f"{asked}, more than the {format_bytes(memory)} of {source}; lower it or leave it out")
    per_worker = (budget // len(shares),) * len(shares)
    _check_nodes(machine, shares, per_worker, name)
    return per_worker, f"{name}: {format_bytes(budget)} ÷ {len(shares)} workers"


def _nodes_of(machine: Machine, shares: Sequence[CoreShare]) -> list[tuple[NumaNode, int]]:
    """The node each worker's memory is judged by (vLLM takes that of the first core) and how many workers it serves."""
    nodes = [find_node(machine.nodes, share.cpus[:1]) for share in shares]
    workers = Counter(node.id for node in nodes if node)
    return [(node or NumaNode(-1, (), None), workers[node.id] if node else 1) for node in nodes]


def _check_nodes(machine: Machine, shares: Sequence[CoreShare], per_worker: Sequence[int], name: str) -> None:
    # vLLM refuses a cache larger than the node of its first core, minutes later and worker by worker.
    for share, (node, workers) in zip(per_worker, _nodes_of(machine, shares), strict=True):
        if node.memory_bytes is not None and share * workers > node.memory_bytes:
            raise SettingsError(
                f"{name} gives {workers} workers of NUMA node {node.id} {format_bytes(share)} of KV cache each, "
                f"but the node has {format_bytes(node.memory_bytes)}; lower it or spread the workers over more nodes"
            )


def _check_minimum(per_worker: Sequence[int], origin: str) -> None:
    if min(per_worker) < SHARE_MIN_BYTES:
        raise SettingsError(
            f"the KV cache of one worker would be {format_bytes(min(per_worker))}, less than {format_bytes(SHARE_MIN_BYTES)} ({origin}); "
            "use fewer workers or raise kv_cache_budget_bytes or the memory limit"
        )


def _pressure(machine: Machine, total: int) -> tuple[str, ...]:
    available = machine.memory_available_bytes
    if available is None or total <= available:
        return ()
    found = f"KV caches of {format_bytes(total)} in all, but only {format_bytes(available)} of memory are free now, so loading may fail"
    return (f"{found}; free some, or lower kv_cache_budget_bytes",)

"""KV memory of CPU engines on made-up machines: the automatic share, stated budgets, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from enginepool.dispatcher.machine import Gpu, Machine, NumaNode
from enginepool.dispatcher.placement import PlacementRequest, Plan, plan_workers
from enginepool.errors import SettingsError

GIB = 1 << 30
KV = "VLLM_CPU_KVCACHE_SPACE"


def _small(**changes: Any) -> Machine:
    """Two cores, 24 GiB."""
    machine = Machine(online_cpus=(0, 1), inherited_cpus=(0, 1), cpuset=(0, 1), memory_total_bytes=24 * GIB)
    return msgspec.structs.replace(machine, **changes)


def _big() -> Machine:
    """Two NUMA nodes with eight cores and 16 GiB each, one GPU."""
    cpus = tuple(range(16))
    nodes = (NumaNode(0, cpus[:8], 16 * GIB), NumaNode(1, cpus[8:], 16 * GIB))
    return Machine(online_cpus=cpus, inherited_cpus=cpus, cpuset=cpus, nodes=nodes, gpus=(Gpu(0),), memory_total_bytes=32 * GIB)


def _plan(machine: Machine, environ: Mapping[str, str] | None = None, **settings: Any) -> Plan:
    return plan_workers(machine, PlacementRequest(environ=environ or {}, **settings))


@pytest.mark.parametrize(
    ("machine", "environ", "settings", "expected"),
    [
        pytest.param(_small(), {}, {"workers": 1}, 4 * GIB, id="auto-capped"),
        pytest.param(_small(memory_limit_bytes=3 * GIB), {}, {"workers": 2}, 3 * GIB // 4, id="auto-half-of-the-cgroup"),
        pytest.param(_big(), {}, {"workers": 8}, 2 * GIB, id="auto-by-node"),
        pytest.param(_big(), {}, {"workers": 3, "cpu_affinity": "0|1|2"}, 8 * GIB // 3, id="auto-crowded-node"),
        pytest.param(_small(memory_total_bytes=None), {}, {"workers": 2}, GIB, id="auto-memory-unknown"),
        pytest.param(_small(), {KV: "0"}, {"workers": 1}, 4 * GIB, id="variable-zero"),
        pytest.param(_small(), {KV: "10"}, {"workers": 2}, 5 * GIB, id="variable-is-the-total"),
        pytest.param(_small(), {KV: "abc"}, {"workers": 2, "kv_cache_bytes": GIB}, GIB // 2, id="setting-wins"),
        pytest.param(_small(), {KV: "4"}, {"workers": 1, "tensor_parallel_size": 2}, 2 * GIB, id="by-rank"),
    ],
)
def test_kv_bytes_follow_the_budget(machine: Machine, environ: dict[str, str], settings: dict[str, Any], expected: int) -> None:
    assert _plan(machine, environ, device="cpu", **settings).workers[0].kv_cache_bytes == expected


@pytest.mark.parametrize(
    ("machine", "environ", "settings", "text"),
    [
        pytest.param(_small(), {KV: "abc"}, {}, f"{KV} is 'abc'", id="word"),
        pytest.param(_small(), {KV: "-1"}, {}, f"{KV} is '-1'", id="negative"),
        pytest.param(_small(), {KV: "nan"}, {}, f"{KV} is 'nan'", id="nan"),
        pytest.param(_small(), {KV: "1e308"}, {}, f"{KV} is '1e308'", id="endless"),
        pytest.param(_small(), {}, {"kv_cache_bytes": -5}, "kv_cache_budget_bytes is -5", id="setting-negative"),
        pytest.param(_small(memory_limit_bytes=3 * GIB), {KV: "64"}, {}, "64.0 GiB of KV cache, more than the 3.0 GiB", id="beyond-memory"),
        pytest.param(
            _big(), {KV: "20"}, {"cpu_affinity": "0"}, "node 0 20.0 GiB of KV cache each, but the node has 16.0", id="beyond-node"
        ),
        pytest.param(_small(), {}, {"kv_cache_bytes": 100 << 20, "workers": 2}, "would be 50 MiB, less than 64 MiB", id="too-small"),
        pytest.param(_small(memory_limit_bytes=100 << 20), {}, {}, "would be 50 MiB, less than 64 MiB", id="auto-too-small"),
    ],
)
def test_kv_budget_is_refused(machine: Machine, environ: dict[str, str], settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        _plan(machine, environ, device="cpu", **settings)
    assert text in str(caught.value)


def test_kv_budget_beyond_free_memory_is_a_warning() -> None:
    assert "only 2.0 GiB of memory are free now" in _plan(_small(memory_available_bytes=2 * GIB)).warnings[0]


def test_kv_budget_on_gpus_is_a_warning() -> None:
    plan = _plan(_big(), kv_cache_bytes=GIB)
    assert plan.workers[0].kv_cache_bytes is None
    assert "no effect on GPUs" in plan.warnings[0]

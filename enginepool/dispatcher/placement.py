"""Plan where every worker runs: cores, threads, devices, KV memory and environment; pure, the supervisor applies it.

```
Machine ┐   devices ──▶ workers ──▶ engine core ──▶ cores ──▶ threads ──▶ KV bytes ──▶ environment
Request ┘   devices.py              here            affinity.py + spread.py   kv_budget.py   environment.py
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from enginepool.dispatcher import environment
from enginepool.dispatcher.affinity import CorePlan, count_threads, plan_cores
from enginepool.dispatcher.cpuset import format_cpus
from enginepool.dispatcher.devices import VARIABLE, count_workers, find_devices
from enginepool.dispatcher.kv_budget import KvPlan, format_bytes, plan_kv
from enginepool.dispatcher.machine import Machine
from enginepool.dispatcher.plan import Device, PlacementRequest, Plan, WorkerPlan
from enginepool.dispatcher.spread import find_node
from enginepool.errors import SettingsError

__all__ = ["PlacementRequest", "Plan", "WorkerPlan", "describe", "plan_workers"]

EngineCore = Literal["inproc", "mp"]


def plan_workers(machine: Machine, request: PlacementRequest) -> Plan:
    """Decide a plan for every worker, with warnings and the origin of each value.

    Raises SettingsError when the request contradicts itself or the machine; the message has the numbers and a way out.
    """
    devices = find_devices(machine, request)
    workers, why = count_workers(request, len(devices))
    core, core_origin = _choose_engine_core(request, devices)
    cores = plan_cores(machine, request, workers, devices)
    kv = plan_kv(machine, request, cores.shares) if request.engine == "vllm" and not devices else None
    plans = tuple(_plan_worker(machine, request, core, index, cores, devices, kv) for index in range(workers))
    origins = {"workers": why, "devices": _devices_origin(request, devices), "engine_core": core_origin, "cpus": cores.origin}
    origins["threads"] = _threads_origin(machine, request, workers)
    if kv:
        origins["kv_cache_bytes"] = kv.origin
    return Plan(plans, _warnings(request, devices, workers, cores, kv), origins)


def describe(plan: Plan) -> list[str]:
    """One line for people per worker, such as `worker 0: cpus 0, 1 thread, kv 4.0 GiB, engine core in process`."""
    has_nodes = len({worker.numa_node for worker in plan.workers}) > 1
    return [f"worker {worker.index}: {', '.join(_facts(worker, has_nodes))}" for worker in plan.workers]


def _choose_engine_core(request: PlacementRequest, devices: Sequence[Device]) -> tuple[EngineCore, str]:
    if request.engine == "echo":
        return "inproc", "echo engines have no engine core"
    if request.engine_core == "inproc" and request.ranks > 1:
        raise SettingsError(
            f"engine_core 'inproc' holds one rank, but tensor_parallel_size {request.tensor_parallel_size} × "
            f"pipeline_parallel_size {request.pipeline_parallel_size} makes {request.ranks}; use 'mp' or 'auto'"
        )
    if request.engine_core != "auto":
        return request.engine_core, "set by the user"
    if devices or request.ranks > 1:
        return "mp", f"auto: own process, {'GPU' if devices else f'{request.ranks} ranks'}"
    return "inproc", "auto: in process, CPU and one rank"


def _plan_worker(
    machine: Machine, request: PlacementRequest, core: EngineCore, index: int, cores: CorePlan, devices: Sequence[Device], kv: KvPlan | None
) -> WorkerPlan:
    share = cores.shares[index]
    num_threads = count_threads(cores.shares, machine.cpu_quota)[index]
    own = tuple(device.name for device in devices[index * request.ranks : (index + 1) * request.ranks])
    env_set = _environment(request, core, own, num_threads)
    if core == "mp" and kv:
        env_set |= environment.bind_variable(share, num_threads, index)
    node = find_node(machine.nodes, share.cpus)
    return WorkerPlan(
        index=index,
        cpus=share.cpus,
        num_threads=num_threads,
        devices=own,
        numa_node=node.id if node else None,
        kv_cache_bytes=kv.rank_bytes[index] if kv else None,
        engine_core=core,
        env_set=env_set,
        env_unset=environment.unset_variables(env_set),
    )


def _environment(request: PlacementRequest, core: EngineCore, devices: tuple[str, ...], num_threads: int) -> dict[str, str]:
    chosen = environment.thread_variables(num_threads, request.ranks) | environment.tokenizer_variables(request.environ)
    if request.engine == "vllm":
        chosen |= environment.vllm_variables(core)
    if devices:
        chosen |= environment.device_variables(devices, request.environ)
    return chosen


def _devices_origin(request: PlacementRequest, devices: Sequence[Device]) -> str:
    if request.engine == "echo":
        return "echo engines need none"
    if not devices:
        return "CPU: vLLM is built for it" if request.device == "cpu" else "CPU: no visible GPU"
    source = f"{VARIABLE}={request.environ[VARIABLE]}" if VARIABLE in request.environ else "all GPUs found"
    return f"{source}: {','.join(device.name for device in devices)}"


def _threads_origin(machine: Machine, request: PlacementRequest, workers: int) -> str:
    words = "cores per worker"
    if machine.cpu_quota is not None:
        words += f", at most CPU quota {machine.cpu_quota:g} ÷ {workers}"
    if "OMP_NUM_THREADS" in request.environ:
        words += f"; OMP_NUM_THREADS={request.environ['OMP_NUM_THREADS']} of the environment is overridden"
    return words


def _warnings(request: PlacementRequest, devices: Sequence[Device], workers: int, cores: CorePlan, kv: KvPlan | None) -> tuple[str, ...]:
    found = [*cores.warnings, *(kv.warnings if kv else ())]
    idle = len(devices) - workers * request.ranks
    if idle > 0 and request.workers == "auto":
        unused = f"{idle} of {len(devices)} devices stay unused: they don't fill a worker of {request.ranks}"
        found.append(f"{unused}; choose parallel sizes that divide them")
    if devices and request.kv_cache_bytes:
        found.append("kv_cache_bytes is for CPU engines and has no effect on GPUs; use vLLM's own gpu_memory_utilization")
    return tuple(found)


def _facts(worker: WorkerPlan, has_nodes: bool) -> list[str]:
    facts = [f"cpus {format_cpus(worker.cpus)}", f"{worker.num_threads} thread{'s' * (worker.num_threads > 1)}"]
    if worker.devices:
        facts.append(f"devices {','.join(worker.devices)}")
    if has_nodes and worker.numa_node is not None:
        facts.append(f"NUMA node {worker.numa_node}")
    if worker.kv_cache_bytes is not None:
        facts.append(f"kv {format_bytes(worker.kv_cache_bytes)}")
    facts.append("engine core in process" if worker.engine_core == "inproc" else "engine core in its own process")
    return facts

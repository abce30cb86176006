"""Placement on made-up machines: who gets which cores, threads, devices, memory and environment, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from enginepool.dispatcher.cpuset import format_cpus
from enginepool.dispatcher.machine import Gpu, Machine, NumaNode
from enginepool.dispatcher.placement import PlacementRequest, Plan, describe, plan_workers
from enginepool.errors import SettingsError

GIB = 1 << 30
BIND = "VLLM_CPU_OMP_THREADS_BIND"
KV = "VLLM_CPU_KVCACHE_SPACE"
DEVICES = "CUDA_VISIBLE_DEVICES"


def _small(**changes: Any) -> Machine:
    """Two cores, 24 GiB, no GPU."""
    machine = Machine(online_cpus=(0, 1), inherited_cpus=(0, 1), cpuset=(0, 1), memory_total_bytes=24 * GIB)
    return msgspec.structs.replace(machine, **changes)


def _big(**changes: Any) -> Machine:
    """Two NUMA nodes of four physical cores with two hyperthreads each (0 and 8, 1 and 9, …), eight GPUs."""
    everything = tuple(range(16))
    machine = Machine(
        online_cpus=everything,
        inherited_cpus=everything,
        cpuset=everything,
        cores=tuple((cpu, cpu + 8) for cpu in range(8)),
        nodes=(NumaNode(0, (0, 1, 2, 3, 8, 9, 10, 11), 16 * GIB), NumaNode(1, (4, 5, 6, 7, 12, 13, 14, 15), 16 * GIB)),
        gpus=tuple(Gpu(index, index // 4, "NVIDIA A100", f"GPU-{index}aaa-bbb") for index in range(8)),
        memory_total_bytes=32 * GIB,
    )
    return msgspec.structs.replace(machine, **changes)


def _plan(machine: Machine, environ: Mapping[str, str] | None = None, **settings: Any) -> Plan:
    return plan_workers(machine, PlacementRequest(environ=environ or {}, **settings))


def _cpus(plan: Plan) -> list[str]:
    return [format_cpus(worker.cpus) for worker in plan.workers]


def _threads(plan: Plan) -> list[int]:
    return [worker.num_threads for worker in plan.workers]


# Workers and devices.


@pytest.mark.parametrize(
    ("machine", "settings", "count"),
    [
        pytest.param(_small(), {}, 1, id="cpu"),
        pytest.param(_big(), {}, 8, id="gpus"),
        pytest.param(_big(), {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2, id="gpus-by-ranks"),
        pytest.param(_big(), {"device": "cpu"}, 1, id="cpu-of-a-gpu-machine"),
        pytest.param(_big(), {"engine": "echo"}, 1, id="echo"),
    ],
)
def test_workers_auto_follows_the_devices(machine: Machine, settings: dict[str, Any], count: int) -> None:
    assert len(_plan(machine, **settings).workers) == count


def test_devices_are_dealt_in_order() -> None:
    plan = _plan(_big(), workers=3, tensor_parallel_size=2)
    assert [worker.devices for worker in plan.workers] == [("0", "1"), ("2", "3"), ("4", "5")]
    assert plan.workers[1].env_set[DEVICES] == "2,3"
    assert plan.workers[1].env_set["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        pytest.param("6,1", ["6", "1"], id="order-kept"),
        pytest.param("GPU-7aaa,GPU-0aaa-bbb", ["GPU-7aaa", "GPU-0aaa-bbb"], id="uuids"),
        pytest.param("MIG-GPU-4aaa-bbb/1/0", ["MIG-GPU-4aaa-bbb/1/0"], id="mig"),
        pytest.param("3,-1,5", ["3"], id="cut-at-minus-one"),
    ],
)
def test_devices_follow_the_visible_list(visible: str, devices: list[str]) -> None:
    plan = _plan(_big(), {DEVICES: visible})
    assert [worker.env_set[DEVICES] for worker in plan.workers] == devices
    assert "CUDA_DEVICE_ORDER" not in plan.workers[0].env_set


@pytest.mark.parametrize("visible", ["", "-1"])
def test_devices_hidden_means_cpu(visible: str) -> None:
    plan = _plan(_big(), {DEVICES: visible})
    assert plan.workers[0].devices == ()
    assert plan.workers[0].kv_cache_bytes == 4 * GIB


def test_devices_named_are_believed_when_none_was_found_but_cuda_is_wanted() -> None:
    assert _plan(_small(), {DEVICES: "0,1"}, device="cuda").workers[1].devices == ("1",)


def test_devices_left_over_are_mentioned() -> None:
    assert "2 of 8 devices stay unused" in _plan(_big(), tensor_parallel_size=3).warnings[0]


def test_workers_on_gpus_sit_on_the_node_of_their_gpu() -> None:
    plan = _plan(_big(), {DEVICES: "GPU-7aaa,0"})
    assert _cpus(plan) == ["4-7,12-15", "0-3,8-11"]
    assert [worker.numa_node for worker in plan.workers] == [1, 0]


def test_workers_on_gpus_of_unknown_node_get_all_cores() -> None:
    assert _cpus(_plan(_big(gpus=(Gpu(0),)))) == ["0-15"]


# Cores.


@pytest.mark.parametrize(
    ("workers", "cpus"),
    [
        pytest.param(1, ["0-15"], id="all"),
        pytest.param(2, ["0-3,8-11", "4-7,12-15"], id="a-node-each"),
        pytest.param(4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"], id="hyperthreads-together"),
        pytest.param(3, ["0-1,8-9", "2-3,10-11", "4-7,12-15"], id="uneven"),
    ],
)
def test_auto_on_cpu_gives_disjoint_cores_node_by_node(workers: int, cpus: list[str]) -> None:
    assert _cpus(_plan(_big(), workers=workers, device="cpu")) == cpus


def test_auto_weighs_nodes_by_their_allowed_cores() -> None:
    machine = _big(cpuset=(0, 4, 5, 6, 7))
    assert _cpus(_plan(machine, workers=3, device="cpu")) == ["0", "4-5", "6-7"]


def test_auto_undoes_a_narrow_mask_within_the_cpuset() -> None:
    plan = _plan(_small(inherited_cpus=(0,)), workers=2)
    assert _cpus(plan) == ["0", "1"]
    assert plan.origins["cpus"] == "cgroup cpuset 0-1, reset from inherited mask 0, divided among the workers"


def test_auto_stays_inside_cpuset_and_online_cores() -> None:
    assert _cpus(_plan(_small(cpuset=(1, 2, 3), inherited_cpus=(1,)))) == ["1"]


def test_unreadable_cpuset_means_online_cores_and_a_warning() -> None:
    plan = _plan(_small(cpuset=None, inherited_cpus=(1,)))
    assert _cpus(plan) == ["0-1"]
    assert "can't be read" in plan.warnings[0]


def test_more_workers_than_cores_share_them_with_one_warning() -> None:
    plan = _plan(_small(), workers=5)
    assert _cpus(plan) == ["0", "1", "0", "1", "0"]
    assert _threads(plan) == [1] * 5
    assert plan.warnings == ("5 workers share 2 cores; fewer workers would be faster",)


def test_echo_engines_share_all_cores_without_a_warning() -> None:
    plan = _plan(_big(), {BIND: "garbage"}, engine="echo", workers=40)
    assert set(_cpus(plan)) == {"0-15"}
    assert plan.warnings == ()
    assert plan.workers[0].kv_cache_bytes is None


@pytest.mark.parametrize(
    ("affinity", "cpus"),
    [
        pytest.param("reset", ["0-15", "0-15"], id="reset"),
        pytest.param("inherit", ["2-3", "2-3"], id="inherit"),
        pytest.param("0-3", ["0-3", "0-3"], id="one-list-for-all"),
        pytest.param("0-3|8,9", ["0-3", "8-9"], id="one-list-each"),
    ],
)
def test_cpu_affinity_is_obeyed(affinity: str, cpus: list[str]) -> None:
    plan = _plan(_big(inherited_cpus=(2, 3)), {BIND: "7"}, cpu_affinity=affinity, workers=2, device="cpu")
    assert _cpus(plan) == cpus


def test_bind_variable_of_the_user_is_used_under_auto() -> None:
    plan = _plan(_small(), {BIND: "1|0"}, workers=2)
    assert _cpus(plan) == ["1", "0"]
    assert plan.origins["cpus"] == f"{BIND} '1|0'"


@pytest.mark.parametrize("word", ["auto", "nobind", "", " "], ids=["auto", "nobind", "empty", "blank"])
def test_bind_variable_without_a_list_is_ignored(word: str) -> None:
    assert _cpus(_plan(_small(), {BIND: word}, workers=2)) == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "bad_part"),
    [
        pytest.param("0-3", "cores 2-3 are not allowed here, only 0-1", id="beyond-the-machine"),
        pytest.param("=5", "'=5' is not a core", id="equals-sign"),
        pytest.param("garbage", "'garbage' is not a core", id="garbage"),
        pytest.param("0|1", "2 groups of cores for 1 worker;", id="too-many-groups"),
        pytest.param("0|", "group 1 is empty", id="empty-group"),
    ],
)
@pytest.mark.parametrize("name", ["cpu_affinity", BIND])
def test_bad_core_list_is_refused_by_name(name: str, text: str, bad_part: str) -> None:
    chosen: dict[str, Any] = {"cpu_affinity": text} if name == "cpu_affinity" else {"environ": {BIND: text}}
    with pytest.raises(SettingsError) as caught:
        plan_workers(_small(), PlacementRequest(workers=1, **chosen))
    assert str(caught.value).startswith(f"{name} is {text!r}: ")
    assert bad_part in str(caught.value)


# Threads.


@pytest.mark.parametrize(
    ("settings", "quota", "threads"),
    [
        pytest.param({"workers": 1}, None, [16], id="all-cores"),
        pytest.param({"workers": 2}, None, [8, 8], id="own-cores"),
        pytest.param({"workers": 2, "cpu_affinity": "reset"}, None, [8, 8], id="shared-cores-count-by-half"),
        pytest.param({"workers": 2}, 5.0, [2, 2], id="quota-divided"),
        pytest.param({"workers": 2}, 0.5, [1, 1], id="at-least-one"),
    ],
)
def test_threads_follow_cores_and_quota(settings: dict[str, Any], quota: float | None, threads: list[int]) -> None:
    assert _threads(_plan(_big(cpu_quota=quota), device="cpu", **settings)) == threads


def test_quota_below_the_workers_is_warned_about() -> None:
    assert "CPU quota of 0.5 cores" in _plan(_small(cpu_quota=0.5)).warnings[0]


def test_omp_num_threads_of_the_user_is_overridden_and_said_so() -> None:
    plan = _plan(_small(), {"OMP_NUM_THREADS": "64"}, workers=2)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    assert [plan.workers[0].env_set[name] for name in names] == ["1"] * 3
    assert "OMP_NUM_THREADS=64 of the environment is overridden" in plan.origins["threads"]


# Engine core and environment.


@pytest.mark.parametrize(
    ("settings", "core"),
    [
        pytest.param({"device": "cpu"}, "inproc", id="cpu"),
        pytest.param({"device": "cpu", "tensor_parallel_size": 2}, "mp", id="cpu-ranks"),
        pytest.param({}, "mp", id="gpu"),
        pytest.param({"engine_core": "inproc"}, "inproc", id="gpu-inproc"),
        pytest.param({"device": "cpu", "engine_core": "mp"}, "mp", id="cpu-mp"),
        pytest.param({"engine": "echo", "engine_core": "mp"}, "inproc", id="echo"),
    ],
)
def test_engine_core_is_chosen_by_platform(settings: dict[str, Any], core: str) -> None:
    worker = _plan(_big(), workers=1, **settings).workers[0]
    assert worker.engine_core == core
    assert worker.env_set.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") == str(int(core == "mp"))


@pytest.mark.parametrize(
    ("settings", "quota", "binds"),
    [
        pytest.param({}, None, ["0-3,8-11", "4-7,12-15"], id="own-cores"),
        pytest.param({"tensor_parallel_size": 2}, None, ["0-1,8-9|2-3,10-11", "4-5,12-13|6-7,14-15"], id="ranks"),
        pytest.param({"cpu_affinity": "0-1"}, None, ["0", "1"], id="shared-cores-taken-in-turn"),
        pytest.param({}, 4.0, ["0-1", "6-7"], id="quota"),
        pytest.param({"tensor_parallel_size": 2, "cpu_affinity": "0-2|3|4|5"}, None, ["0-2|3", "4|5"], id="list-by-rank"),
    ],
)
def test_bind_variable_carries_the_cores_in_mp_mode(settings: dict[str, Any], quota: float | None, binds: list[str]) -> None:
    plan = _plan(_big(cpu_quota=quota), workers=2, device="cpu", engine_core="mp", **settings)
    assert [worker.env_set[BIND] for worker in plan.workers] == binds
    assert BIND not in plan.workers[0].env_unset


def test_environment_drops_bindings_and_what_is_meant_for_others() -> None:
    worker = _plan(_small()).workers[0]
    dropped = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", KV, BIND}
    assert dropped | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VLLM_PORT"} <= set(worker.env_unset)
    assert worker.env_set["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(("environ", "value"), [({}, "false"), ({"TOKENIZERS_PARALLELISM": "true"}, None)], ids=["unset", "user"])
def test_tokenizer_threads_are_off_unless_the_user_decided(environ: dict[str, str], value: str | None) -> None:
    assert _plan(_small(), environ).workers[0].env_set.get("TOKENIZERS_PARALLELISM") == value


@pytest.mark.parametrize("core", ["inproc", "mp"])
def test_usage_reporting_stays_as_the_user_set_it(core: str) -> None:
    names = {"VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK", "VLLM_USAGE_SOURCE", "VLLM_USAGE_STATS_SERVER", "VLLM_CONFIG_ROOT"}
    worker = _plan(_small(), dict.fromkeys(names, "1"), engine_core=core).workers[0]
    assert not names & {*worker.env_set, *worker.env_unset}


# Refusals and words.


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param({"workers": 0}, "workers is 0; it must be 1 or more", id="no-workers"),
        pytest.param({"workers": -2}, "workers is -2", id="negative-workers"),
        pytest.param({"tensor_parallel_size": 0}, "tensor_parallel_size is 0", id="no-tensor-ranks"),
        pytest.param({"pipeline_parallel_size": -1}, "pipeline_parallel_size is -1", id="negative-pipeline"),
        pytest.param(
            {"workers": 3, "tensor_parallel_size": 4}, "takes 12 devices, but 8 are visible; use at most 2", id="too-many-workers"
        ),
        pytest.param({"tensor_parallel_size": 16}, "take 16 devices per worker, but 8 are visible", id="too-many-ranks"),
        pytest.param({"engine_core": "inproc", "tensor_parallel_size": 2}, "engine_core 'inproc' holds one rank", id="inproc-ranks"),
        pytest.param({"device": "cuda", "environ": {DEVICES: ""}}, f"8 found, {DEVICES} is ''", id="cuda-hidden"),
        pytest.param({"environ": {DEVICES: "0,8"}}, "there is no device 8, only 0 to 7", id="device-beyond"),
        pytest.param({"environ": {DEVICES: "1,1"}}, "'1' is listed twice", id="device-twice"),
        pytest.param({"environ": {DEVICES: "0,,1"}}, "'' is neither an index", id="device-empty"),
        pytest.param({"environ": {DEVICES: "gpu0"}}, "'gpu0' is neither an index", id="device-word"),
    ],
)
def test_request_is_refused_with_the_numbers(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        plan_workers(_big(), PlacementRequest(**settings))
    assert text in str(caught.value)


def test_cuda_without_any_gpu_is_refused() -> None:
    with pytest.raises(SettingsError, match="0 found, CUDA_VISIBLE_DEVICES is not set"):
        _plan(_small(), device="cuda")


def test_origins_say_where_values_came_from() -> None:
    origins = _plan(_small()).origins
    assert origins["workers"] == "auto: 1 on CPU"
    assert origins["kv_cache_bytes"].startswith("auto: half of 24.0 GiB (the machine's memory)")
    assert set(origins) == {"workers", "devices", "engine_core", "cpus", "threads", "kv_cache_bytes"}


def test_describe_writes_one_line_a_worker() -> None:
    assert describe(_plan(_small(), workers=2))[0] == "worker 0: cpus 0, 1 thread, kv 4.0 GiB, engine core in process"
    last = "worker 1: cpus 4-7,12-15, 8 threads, devices 4, NUMA node 1, engine core in its own process"
    assert describe(_plan(_big(), {DEVICES: "0,4"}))[1] == last

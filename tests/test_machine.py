"""A machine is read from made-up /proc, /sys and /dev trees in the layouts that hosts and containers have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from enginepool.dispatcher.machine import Gpu, Machine, NumaNode, read_machine

GIB = 1 << 30
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""
V2_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture(autouse=True)
def _inherited_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _read(root: Path, files: dict[str, str]) -> Machine:
    _write(root, files)
    return read_machine(root, {})


def _v1(root: Path, files: dict[str, str], mounts: str = V1_MOUNTS) -> Machine:
    members = "9:cpuset:/a/b\n8:cpu,cpuacct:/a/b\n7:memory:/a/b\n0::/\n"
    return _read(root, {"proc/self/mountinfo": mounts, "proc/self/cgroup": members, **files})


def _v2(root: Path, files: dict[str, str], member: str = "/a/b", mounts: str = V2_MOUNTS) -> Machine:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return _read(root, {"proc/self/mountinfo": mounts, "proc/self/cgroup": f"0::{member}\n", **files})


def test_machine_with_nothing_readable_keeps_the_mask(tmp_path: Path) -> None:
    assert read_machine(tmp_path, {}) == Machine(online_cpus=(0,), inherited_cpus=(0,))


def test_machine_reads_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    machine = read_machine()
    assert set(machine.inherited_cpus) == os.sched_getaffinity(0)
    assert machine.online_cpus


def test_machine_reads_topology_and_memory(tmp_path: Path) -> None:
    machine = _read(
        tmp_path,
        {
            "sys/devices/system/cpu/online": "0-3\n",
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0,2",
            "sys/devices/system/cpu/cpu1/topology/thread_siblings_list": "1,3",
            "sys/devices/system/cpu/cpu2/topology/thread_siblings_list": "0,2",
            "sys/devices/system/node/node0/cpulist": "0-3",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  1048576 kB\nNode 0 MemFree: 1 kB\n",
            "sys/devices/system/node/node1/cpulist": "\n",
            "proc/meminfo": "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nHugePages_Total: 0\n",
        },
    )
    assert machine.online_cpus == (0, 1, 2, 3)
    assert machine.cores == ((0, 2), (1, 3))
    assert machine.nodes == (NumaNode(0, (0, 1, 2, 3), GIB),)
    assert (machine.memory_total_bytes, machine.memory_available_bytes) == (2 * GIB, GIB)


def test_cgroup_v1_takes_the_tightest_of_the_parents(tmp_path: Path) -> None:
    machine = _v1(
        tmp_path,
        {
            "sys/fs/cgroup/cpuset/cpuset.cpus": "0-7",
            "sys/fs/cgroup/cpuset/a/b/cpuset.effective_cpus": "2-3",
            "sys/fs/cgroup/cpuset/a/b/cpuset.cpus": "",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert (machine.cpuset, machine.cpu_quota, machine.memory_limit_bytes) == ((2, 3), 1.5, 3 * GIB)


def test_cgroup_v1_without_limits_is_none(tmp_path: Path) -> None:
    machine = _v1(
        tmp_path,
        {
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert (machine.cpuset, machine.cpu_quota, machine.memory_limit_bytes) == (None, None, None)


def test_cgroup_v1_in_a_container_maps_the_mounted_branch(tmp_path: Path) -> None:
    mounts = "35 31 0:32 /a/b /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    machine = _v1(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB)}, mounts)
    assert machine.memory_limit_bytes == GIB


def test_cgroup_v2_takes_the_tightest_of_the_parents(tmp_path: Path) -> None:
    files = {
        "cpuset.cpus.effective": "0-7",
        "a/cpuset.cpus.effective": "1,3",
        "a/cpu.max": "50000 100000",
        "a/b/cpu.max": "max 100000",
        "a/memory.max": "max",
        "a/b/memory.max": str(2 * GIB),
    }
    machine = _v2(tmp_path, files)
    assert (machine.cpuset, machine.cpu_quota, machine.memory_limit_bytes) == ((1, 3), 0.5, 2 * GIB)


@pytest.mark.parametrize("member", ["/", "/../../elsewhere", "/gone/away"], ids=["root", "outside-the-namespace", "missing"])
def test_cgroup_v2_falls_back_to_the_mount(tmp_path: Path, member: str) -> None:
    assert _v2(tmp_path, {"cpu.max": "200000 100000"}, member).cpu_quota == 2.0


@pytest.mark.parametrize("text", ["", "max", "0 0", "fast 100000", "50000"], ids=["empty", "one-word", "zeros", "word", "no-period"])
def test_cgroup_v2_ignores_a_strange_quota(tmp_path: Path, text: str) -> None:
    assert _v2(tmp_path, {"cpu.max": text}).cpu_quota is None


def test_cgroup_hybrid_reads_each_controller_where_it_lives(tmp_path: Path) -> None:
    mounts = V1_MOUNTS.replace("/cpuset rw - cgroup cgroup rw,cpuset", "/unified rw - cgroup2 cgroup2 rw")
    files = {"sys/fs/cgroup/unified/cpuset.cpus.effective": "4-5", "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(GIB)}
    machine = _v1(tmp_path, files, mounts)
    assert (machine.cpuset, machine.memory_limit_bytes) == ((4, 5), GIB)


@pytest.mark.parametrize("folder", ["cpuset/cpuset.cpus", "cpuset.cpus.effective"], ids=["v1", "v2"])
def test_cgroup_without_mountinfo_looks_in_the_usual_place(tmp_path: Path, folder: str) -> None:
    assert _read(tmp_path, {f"sys/fs/cgroup/{folder}": "0-1"}).cpuset == (0, 1)


def _gpu_files(bus_id: str, minor: int, extra: str = "") -> dict[str, str]:
    facts = f"Model: \t NVIDIA A100\nGPU UUID: \t GPU-{minor}\nBus Location: \t {bus_id}\nDevice Minor: \t {minor}\n{extra}"
    return {f"proc/driver/nvidia/gpus/{bus_id}/information": facts, f"dev/nvidia{minor}": ""}


def test_gpus_are_found_in_bus_order_with_their_node(tmp_path: Path) -> None:
    nodes = {"sys/bus/pci/devices/0000:0a:00.0/numa_node": "1\n", "sys/bus/pci/devices/0000:07:00.0/numa_node": "-1\n"}
    machine = _read(tmp_path, _gpu_files("0000:0A:00.0", 0) | _gpu_files("0000:07:00.0", 1) | nodes)
    assert machine.gpus == (Gpu(0, None, "NVIDIA A100", "GPU-1"), Gpu(1, 1, "NVIDIA A100", "GPU-0"))


def test_gpus_without_a_device_file_are_not_ours(tmp_path: Path) -> None:
    _write(tmp_path, _gpu_files("0000:07:00.0", 0))
    (tmp_path / "dev/nvidia0").unlink()
    assert read_machine(tmp_path, {}).gpus == ()


def test_gpus_excluded_by_the_driver_are_left_out(tmp_path: Path) -> None:
    assert _read(tmp_path, _gpu_files("0000:07:00.0", 0, "GPU Excluded: Yes\n")).gpus == ()


def test_gpus_are_not_offered_to_a_container_without_any(tmp_path: Path) -> None:
    _write(tmp_path, _gpu_files("0000:07:00.0", 0))
    assert read_machine(tmp_path, {"NVIDIA_VISIBLE_DEVICES": "void"}).gpus == ()


def test_gpus_never_used_have_no_uuid(tmp_path: Path) -> None:
    files = _gpu_files("0000:07:00.0", 0)
    masked = {name: text.replace("GPU-0", "GPU-????????-????") for name, text in files.items()}
    assert _read(tmp_path, masked).gpus[0].uuid is None

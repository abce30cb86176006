"""Read what this machine offers an engine: cores, control-group limits, NUMA nodes, GPUs and memory.

Everything comes from small files under `/proc`, `/sys` and `/dev`, so that the dispatcher needs neither torch nor a driver
tool; `placement` decides on what was read. Nothing here raises: what can't be read is None or empty.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from enginepool.dispatcher.cgroup import read_cgroup, read_cpus, read_text

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"


class NumaNode(msgspec.Struct, frozen=True):
    """One NUMA node; `memory_bytes` is None where the kernel doesn't say."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None


class Gpu(msgspec.Struct, frozen=True):
    """One NVIDIA GPU; `index` is its place in PCI bus order."""

    index: int
    numa_node: int | None = None
    name: str | None = None
    uuid: str | None = None


class Machine(msgspec.Struct, frozen=True):
    """What the machine is, as seen by this process.

    `cpuset` is the effective set of the control group (None: unreadable), `cpu_quota` is in cores (None: no quota),
    `inherited_cpus` the mask this process was started with, `cores` the logical CPUs of each physical core.
    `memory_limit_bytes` is the tightest control-group limit (None: none).
    """

    online_cpus: tuple[int, ...]
    inherited_cpus: tuple[int, ...]
    cpuset: tuple[int, ...] | None = None
    cpu_quota: float | None = None
    cores: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None


def read_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Read the machine below `root` (tests pass a made-up tree).

    `environ` only answers whether a container was given no GPUs (`NVIDIA_VISIBLE_DEVICES`); `CUDA_VISIBLE_DEVICES` is
    `placement`'s business. Only NVIDIA GPUs are found; AMD and others are not supported.
    """
    inherited = tuple(sorted(os.sched_getaffinity(0)))
    online = read_cpus(root / _CPU / "online") or inherited
    limits = read_cgroup(root)
    memory = _read_meminfo(root / "proc/meminfo")
    return Machine(
        online_cpus=online,
        inherited_cpus=inherited,
        cpuset=limits.cpuset,
        cpu_quota=limits.cpu_quota,
        cores=_read_cores(root, online),
        nodes=_read_nodes(root),
        gpus=_read_gpus(root, environ),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=limits.memory_bytes,
    )


def _read_cores(root: Path, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    siblings = (read_cpus(root / _CPU / f"cpu{cpu}/topology/thread_siblings_list") for cpu in online)
    return tuple(sorted({core for core in siblings if core}))


def _read_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in (root / _NODE).glob("node[0-9]*"):
        cpus = read_cpus(folder / "cpulist")
        # Nodes without cores (memory expanders, some HBM) can't hold a worker.
        if cpus and folder.name[4:].isdecimal():
            nodes.append(NumaNode(int(folder.name[4:]), cpus, _read_meminfo(folder / "meminfo").get("MemTotal")))
    return tuple(sorted(nodes, key=lambda node: node.id))


def _read_meminfo(path: Path) -> dict[str, int]:
    """The kB lines of a meminfo file in bytes; a node's lines carry `Node 0` in front."""
    sizes: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        number = value.split()
        if key and number[1:] == ["kB"] and number[0].isdecimal():
            sizes[key.split()[-1]] = int(number[0]) * 1024
    return sizes


def _read_gpus(root: Path, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    if environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
        return ()
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        facts = _read_gpu_facts(folder / "information")
        if _is_usable(root, facts):
            gpus.append(Gpu(len(gpus), _read_gpu_node(root, folder.name), facts.get("Model"), _known_uuid(facts)))
    return tuple(gpus)


def _read_gpu_facts(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in (read_text(path) or "").splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _is_usable(root: Path, facts: dict[str, str]) -> bool:
    # A container without GPUs still sees the host's /proc/driver/nvidia; what it lacks is the device file.
    minor = facts.get("Device Minor")
    return facts.get("GPU Excluded") != "Yes" and minor is not None and (root / f"dev/nvidia{minor}").exists()


def _known_uuid(facts: dict[str, str]) -> str | None:
    # The driver writes question marks until the GPU was used once.
    uuid = facts.get("GPU UUID", "")
    return uuid if uuid and "?" not in uuid else None


def _read_gpu_node(root: Path, bus_id: str) -> int | None:
    text = read_text(root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node") or ""
    # -1: the firmware doesn't say.
    return int(text) if text.isdecimal() else None

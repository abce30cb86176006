"""Read what this process's control groups allow: cores, CPU quota and memory (cgroup v1, v2 and the hybrid of both).

Where the folders are comes from `/proc/self/cgroup` (the path of this process) and `/proc/self/mountinfo` (which part of
the tree is mounted where; a container often sees only its own branch). Each controller is looked up by itself, because on
hybrid hosts some live in v1 and others in v2. Nothing here raises: what can't be read is None.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import msgspec

from enginepool.dispatcher.cpuset import parse_cpus

# v1 writes "no limit" as the largest page-aligned 63-bit number, which differs by page size.
_V1_UNLIMITED_BYTES = 1 << 60
_DEFAULT_MOUNT = "/sys/fs/cgroup"


class CgroupLimits(msgspec.Struct, frozen=True):
    """What the control groups of this process allow; None where nothing limits or nothing could be read."""

    cpuset: tuple[int, ...] | None
    cpu_quota: float | None
    memory_bytes: int | None


class _Mount(msgspec.Struct, frozen=True):
    version: int
    controllers: frozenset[str]
    branch: str
    point: str


def read_cgroup(root: Path) -> CgroupLimits:
    """Read the effective cpuset, the tightest CPU quota in cores and the tightest memory limit in bytes.

    A quota or limit set on any parent binds too, so both walk up to the mount and keep the smallest.
    """
    cores = [cpus for folder in control_folders(root, "cpuset") if (cpus := _cpuset(folder))]
    quotas = [quota for folder in control_folders(root, "cpu") if (quota := _quota(folder)) is not None]
    limits = [limit for folder in control_folders(root, "memory") if (limit := read_memory_limit(folder)) is not None]
    # The innermost effective set is already the intersection with all its parents.
    return CgroupLimits(cores[0] if cores else None, min(quotas, default=None), min(limits, default=None))


def read_pids(root: Path) -> int | None:
    """How many more processes and threads the tightest control group lets this process make; None: no limit."""
    left = []
    for folder in control_folders(root, "pids"):
        limit, current = read_text(folder / "pids.max") or "", read_text(folder / "pids.current") or ""
        if limit.isdecimal() and current.isdecimal():
            left.append(max(0, int(limit) - int(current)))
    return min(left, default=None)


def control_folders(root: Path, controller: str) -> list[Path]:
    """The control group of this process for one controller and all its visible parents, innermost first."""
    mount = _find_mount(root, controller)
    top = root / mount.point.lstrip("/")
    member = PurePosixPath(_membership(root).get(controller if mount.version == 1 else "", "/"))
    if ".." in member.parts or not member.is_relative_to(mount.branch):
        return [top]
    inside = member.relative_to(mount.branch)
    return [top / part for part in (inside, *inside.parents)]


def read_memory_limit(folder: Path) -> int | None:
    """The memory limit of one control group in bytes; None where there is none."""
    text = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes") or ""
    return int(text) if text.isdecimal() and int(text) < _V1_UNLIMITED_BYTES else None


def read_text(path: Path) -> str | None:
    """The stripped text of a small kernel file, None if it isn't there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_cpus(path: Path) -> tuple[int, ...] | None:
    """The cores listed in a kernel file; None if unreadable, empty or not a list."""
    try:
        return parse_cpus(read_text(path) or "") or None
    except ValueError:
        return None


def _find_mount(root: Path, controller: str) -> _Mount:
    mounts = _mounts(root)
    v1 = [mount for mount in mounts if mount.version == 1 and controller in mount.controllers]
    v2 = [mount for mount in mounts if mount.version == 2]
    for mount in (*v1, *v2):
        return mount
    # Without mountinfo the usual places are still worth a look.
    is_v1 = (root / _DEFAULT_MOUNT.lstrip("/") / controller).is_dir()
    return _Mount(1 if is_v1 else 2, frozenset(), "/", f"{_DEFAULT_MOUNT}/{controller}" if is_v1 else _DEFAULT_MOUNT)


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if len(place) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            version = 1 if kind[0] == "cgroup" else 2
            mounts.append(_Mount(version, frozenset(kind[2].split(",")), place[3], place[4]))
    return mounts


def _membership(root: Path) -> dict[str, str]:
    """The path of this process by controller; the v2 path is kept under the empty name, as the kernel writes it."""
    paths: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _cpuset(folder: Path) -> tuple[int, ...] | None:
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        if cpus := read_cpus(folder / name):
            return cpus
    return None


def _quota(folder: Path) -> float | None:
    text = read_text(folder / "cpu.max")
    if text is None:
        text = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
    quota, _, period = text.partition(" ")
    # "max" and -1 mean no quota; so does anything else that isn't two positive numbers.
    if not (quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0):
        return None
    return int(quota) / int(period)

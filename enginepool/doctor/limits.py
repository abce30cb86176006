"""The limits of this process and of the machine that a pool can run into, beside cores and memory."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import msgspec

from enginepool.dispatcher.cgroup import read_pids, read_text
from enginepool.dispatcher.descriptors import raised_limit


class Limits(msgspec.Struct, frozen=True):
    """Soft limits, None where there is none. `num_tasks` are this user's threads; `pids_left` is what the control group still allows.

    `most_open_files` is the hard limit, as far as a dispatcher raises its own.
    """

    open_files: int | None = None
    most_open_files: int | None = None
    processes: int | None = None
    num_tasks: int | None = None
    pids_left: int | None = None
    address_space_bytes: int | None = None
    locked_memory_bytes: int | None = None
    shm_free_bytes: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Read them for this process, whose children inherit them."""
    # The kernel doesn't hold root to the number of processes.
    processes = _soft(resource.RLIMIT_NPROC) if os.geteuid() else None
    return Limits(
        open_files=_soft(resource.RLIMIT_NOFILE),
        most_open_files=raised_limit(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        processes=processes,
        num_tasks=None if processes is None else _count_tasks(root),
        pids_left=read_pids(root),
        address_space_bytes=_soft(resource.RLIMIT_AS),
        locked_memory_bytes=_soft(resource.RLIMIT_MEMLOCK),
        shm_free_bytes=_free(root / "dev/shm"),
    )


def _soft(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _count_tasks(root: Path) -> int:
    count = 0
    for folder in (root / "proc").glob("[0-9]*"):
        lines = dict(line.split(":\t", 1) for line in (read_text(folder / "status") or "").splitlines() if ":\t" in line)
        if lines.get("Uid", "").split()[:1] == [str(os.getuid())]:
            count += int(lines.get("Threads", "1"))
    return count


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None

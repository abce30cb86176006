"""CPU masks as they come from outside: deliberate, accidental, forbidden; read from the threads of real workers."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Serve, Served, wait_for, worker_pids
from seccomp import SCHED_SETAFFINITY, forbid_affinity
from surroundings import on_one_core

from enginepool import Pool, SamplingParams
from enginepool.dispatcher.cgroup import control_folders
from enginepool.dispatcher.machine import read_machine
from enginepool.errors import ExitCode

ALLOWED = set(read_machine().cpuset or os.sched_getaffinity(0))
FIRST = min(ALLOWED)
TWO_CORES = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores")
SHRUNK = {"OMP_PROC_BIND": "TRUE", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0", "KMP_AFFINITY": "compact"}


def _masks(served: Served) -> list[set[int]]:
    """The masks of all threads of all workers, each told once; the pool has to answer too."""
    json.loads(served.ready_line())
    with Pool.connect() as pool:
        assert all(output.ok for output in pool.generate_many(["hello"] * 8, SamplingParams(max_tokens=3)))
        tasks = [int(path.name) for pid in worker_pids(pool) for path in Path(f"/proc/{pid}/task").iterdir()]
    found = [os.sched_getaffinity(task) for task in tasks]
    return [mask for index, mask in enumerate(found) if mask not in found[:index]]


def _stop(served: Served) -> str:
    served.process.send_signal(signal.SIGTERM)
    code, stderr = served.finish()
    assert code == ExitCode.OK
    return stderr


@TWO_CORES
@pytest.mark.parametrize(("affinity", "mask"), [("auto", ALLOWED), ("reset", ALLOWED), ("inherit", {FIRST})])
def test_inherited_mask_is_undone_or_kept_as_asked(serve: Serve, affinity: str, mask: set[int]) -> None:
    """With what made it: OpenMP's binding variables, which would shrink the masks again."""
    served = serve("--engine", "echo", "--workers", "2", "--cpu-affinity", affinity, env=SHRUNK, preexec_fn=on_one_core())
    assert _masks(served) == [mask]
    stderr = _stop(served)
    assert (f"reset from inherited mask {FIRST}" in stderr) == (affinity != "inherit")
    assert (f"cpus from inherited mask {FIRST}" in stderr) == (affinity == "inherit")


@TWO_CORES
def test_workers_get_the_cores_of_their_list(serve: Serve) -> None:
    first, second = sorted(ALLOWED)[:2]
    assert _masks(serve("--engine", "echo", "--workers", "2", "--cpu-affinity", f"{second}|{first}")) == [{second}, {first}]


@TWO_CORES
@pytest.mark.skipif(platform.machine() not in SCHED_SETAFFINITY, reason="the system call's number is not known here")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL], ids=["EPERM", "EINVAL"])
def test_mask_that_may_not_be_set_is_a_warning_with_both(serve: Serve, number: int) -> None:
    served = serve("--engine", "echo", "--workers", "2", "--cpu-affinity", str(FIRST), preexec_fn=forbid_affinity(number))
    assert _masks(served) == [ALLOWED]
    stderr = _stop(served)
    assert stderr.count(f"warning: the mask of cpus [{FIRST}] could not be set; it may run on {sorted(ALLOWED)}") == 2


@pytest.fixture
def one_core_group() -> Iterator[Callable[[], object]]:
    """A real cpuset control group with one core; returns what moves a process into it."""
    own = control_folders(Path("/"), "cpuset")[0]
    folder = own / f"enginepool-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpuset.cpus").write_text(str(FIRST))
        if (folder / "cpuset.mems").exists():
            (folder / "cpuset.mems").write_text((own / "cpuset.mems").read_text())
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no cpuset control group can be made here: {error}")
    yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the end of the processes in the group", 10)
    folder.rmdir()


@TWO_CORES
def test_cpuset_of_one_core_is_the_limit(serve: Serve, one_core_group: Callable[[], object]) -> None:
    """As `docker --cpuset-cpus=0`: more workers than cores share them."""
    served = serve("--engine", "echo", "--workers", "2", preexec_fn=one_core_group)
    assert _masks(served) == [{FIRST}]
    assert f"cpus from cgroup cpuset {FIRST}" in _stop(served)

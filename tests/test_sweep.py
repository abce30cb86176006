"""What killed pools left in the run directory goes with the next start; nothing of a living pool, nothing of anybody else."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Serve, wait_for_end

from enginepool import Pool
from enginepool.locks import folder_locked
from enginepool.rundir import Claim, claim_endpoint, make_run_dir
from enginepool.sweep import sweep_run_dir

DEAD = "99999999"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run_dir({"ENGINEPOOL_RUN_DIR": str(tmp_path / "run")})


@pytest.fixture
def claims() -> Iterator[list[Claim]]:
    """Claims to be released when the test is over."""
    held: list[Claim] = []
    yield held
    for claim in held:
        claim.release()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _socket(path: Path) -> None:
    """By way of its folder's descriptor, since the path of a test's folder may be longer than a socket's may be."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _leave(folder: Path, *stems: str) -> None:
    """Make the files of killed pools: by its socket's name for ipc, by `tcp-ADDRESS-PORT` for tcp."""
    for stem in stems:
        (folder / f"{stem}.lock").write_text(DEAD)
        (folder / f"{stem}.secret").write_bytes(b"s" * 32)
        for name in (f"{stem}-{DEAD}.back",) if stem.startswith("tcp-") else (stem, f"{stem}.back"):
            _socket(folder / name)


def _kill(serve: Serve, *arguments: str) -> str:
    """Serve a pool and kill its dispatcher; returns where it was."""
    served = serve("--engine", "echo", *arguments)
    line = json.loads(served.ready_line())
    with Pool.connect(line["endpoint"]) as pool:
        pids = [worker.pid for worker in pool.status().workers if worker.pid]
    served.process.kill()
    served.finish()
    wait_for_end(pids)
    return str(line["endpoint"])


def test_files_of_killed_dispatchers_go_with_the_next_start(serve: Serve, fresh_run_dir: Path) -> None:
    """Of all kinds of endpoints, by a start at yet another one."""
    for arguments in (["--endpoint", f"ipc://{fresh_run_dir}/own.sock"], ["--endpoint", "tcp://127.0.0.1:0"]):
        _kill(serve, *arguments)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _kill(serve, "--endpoint", f"tcp://127.0.0.1:{port}")
    assert len(_names(fresh_run_dir)) >= 3
    serve("--engine", "echo", "--endpoint", f"ipc://{fresh_run_dir}/new.sock").ready_line()
    assert _names(fresh_run_dir) == {"new.sock", "new.sock.back", "new.sock.lock", "new.sock.secret"}


def test_files_of_a_living_pool_stay_whoever_starts(serve: Serve, fresh_run_dir: Path) -> None:
    first = json.loads(serve("--engine", "echo", "--endpoint", "tcp://127.0.0.1:0").ready_line())
    second = json.loads(serve("--engine", "echo").ready_line())
    before = _names(fresh_run_dir)
    serve("--engine", "echo", "--endpoint", f"ipc://{fresh_run_dir}/new.sock").ready_line()
    assert _names(fresh_run_dir) >= before
    for line in (first, second):
        with Pool.connect(line["endpoint"]) as pool:
            assert pool.generate("hello").ok


def test_sweep_takes_all_that_dead_pools_left(folder: Path) -> None:
    _leave(folder, "default.sock", "abc.sock", "tcp-127.0.0.1-5555", "tcp-0.0.0.0-5556")
    (folder / "tcp-127.0.0.1-0.99999999.lock").write_text(DEAD)
    _socket(folder / "tcp-127.0.0.1-0-99999999.back")
    (folder / "tcp-127.0.0.1-40001.secret").write_bytes(b"s" * 32)
    (folder / "abc.sock.draft").write_bytes(b"s" * 32)
    (folder / "new.sock.lock").touch()  # killed before it wrote its pid
    (folder / "new.sock.draft").touch()
    num_files = len(_names(folder))
    assert sweep_run_dir(folder) == num_files
    assert _names(folder) == set()


def test_sweep_leaves_what_a_claim_holds(folder: Path, claims: list[Claim]) -> None:
    environ = {"ENGINEPOOL_RUN_DIR": str(folder)}
    for endpoint in (None, f"ipc://{folder}/own.sock", "tcp://127.0.0.1:5555", "tcp://127.0.0.1:0"):
        claims.append(claim_endpoint(endpoint, "pool", environ))
        for address in (claims[-1].endpoint, claims[-1].back):
            if address.startswith("ipc://"):
                _socket(Path(address.removeprefix("ipc://")))
        claims[-1].publish(claims[-1].endpoint.replace(":0", ":5556"))
    before = _names(folder)
    assert len(before) == 14
    assert sweep_run_dir(folder) == 0
    assert _names(folder) == before


def _link(path: Path, target: Path) -> None:
    target.write_text(DEAD)
    path.symlink_to(target)


FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "notes.lock": lambda path, _: path.write_text("do not touch"),
    "linked.lock": _link,
    "folder.lock": lambda path, _: path.mkdir(),
    "pipe.lock": lambda path, _: os.mkfifo(path),
    "alone.sock": lambda path, _: _socket(path),
    "alone.back": lambda path, _: _socket(path),
    "alone.secret": lambda path, _: path.write_bytes(b"s" * 32),
    "tcp-127.0.0.1-5555.secret": lambda path, _: path.write_bytes(b"s" * 33),
    "tcp-notes.secret": lambda path, _: path.write_bytes(b"s" * 32),
    "pool.toml": lambda path, _: path.write_text("workers = 2"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_sweep_leaves_what_no_pool_has_made(folder: Path, tmp_path: Path, name: str) -> None:
    FOREIGN[name](folder / name, tmp_path / "target")
    assert sweep_run_dir(folder) == 0
    assert _names(folder) == {name}


@pytest.mark.parametrize("suffix", ["", ".back", ".secret", ".draft"])
def test_sweep_leaves_a_file_that_only_has_the_name(folder: Path, suffix: str) -> None:
    (folder / "data.lock").write_text(DEAD)
    (folder / f"data{suffix}").write_text("precious, and not as a pool would have it")
    sweep_run_dir(folder)
    assert _names(folder) == {f"data{suffix}"}


def test_sweep_leaves_a_secret_that_somebody_holds(folder: Path) -> None:
    secret = folder / "tcp-127.0.0.1-5555.secret"
    secret.write_bytes(b"s" * 32)
    with secret.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep_run_dir(folder) == 0
    assert sweep_run_dir(folder) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_sweep_leaves_files_of_other_users(folder: Path) -> None:
    _leave(folder, "theirs.sock")
    before = _names(folder)
    for name in before:
        os.chown(folder / name, 65534, 65534)
    assert sweep_run_dir(folder) == 0
    assert _names(folder) == before


def test_start_waits_for_one_that_sweeps(folder: Path) -> None:
    """Else the lock that is tried by one would refuse the other."""
    code = (
        "import sys; from enginepool.rundir import claim_endpoint\n"
        "print('begins', flush=True); claim = claim_endpoint(None, 'pool'); print('claimed', flush=True); claim.release()"
    )
    with folder_locked(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"ENGINEPOOL_RUN_DIR": str(folder)}
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        assert _names(folder) == set()
    assert process.communicate(timeout=20)[0] == "claimed\n"
    assert process.returncode == 0


def test_starts_at_the_same_moment_disturb_nobody(folder: Path) -> None:
    """Each gets an endpoint of its own, with the leftovers of dead pools in the way."""
    _leave(folder, "default.sock", *(f"pool-{number}.sock" for number in range(8)))
    code = (
        "import sys; from enginepool.rundir import claim_endpoint\n"
        "claim = claim_endpoint(None, sys.argv[1]); print(claim.endpoint, flush=True); sys.stdin.read(); claim.release()"
    )
    env = os.environ | {"ENGINEPOOL_RUN_DIR": str(folder)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, f"pool-{number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for number in range(8)
    ]
    claimed = [process.stdout.readline() for process in processes if process.stdout is not None]
    assert [process.communicate(timeout=20)[0] for process in processes] == [""] * 8
    assert len(set(claimed)) == 8
    assert f"ipc://{folder}/default.sock\n" in claimed
    assert _names(folder) == set()

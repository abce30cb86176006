"""Where a pool would listen and who is there already, told without making, locking or binding anything.

A lock that is tried, even for a moment, would refuse a pool that starts just then. So the secret (which nobody else ever locks)
and the kernel's table of locks are asked instead, and for tcp the kernel's table of listening ports.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from enginepool import rundir
from enginepool.dispatcher.cgroup import read_text
from enginepool.doctor.folders import why_not_writable
from enginepool.endpoint import EVERY_INTERFACE, MAX_IPC_PATH_BYTES, check_endpoint, is_near
from enginepool.errors import EndpointInUse, SettingsError
from enginepool.locks import is_locked

_LISTENING = "0A"


class EndpointFacts(msgspec.Struct, frozen=True):
    """The endpoint a pool would hold; `default_holder` is the pid of a pool on the default endpoint, which then is not ours."""

    run_dir: str
    run_dir_exists: bool
    endpoint: str
    is_explicit: bool
    default_holder: int | None = None
    has_keys: bool = False


def examine_endpoint(
    endpoint: str | None, environ: Mapping[str, str] = os.environ, root: Path = Path("/"), keys: str | None = None
) -> EndpointFacts:
    """Follow `rundir.claim_endpoint` and the binding after it. Raises what they would raise."""
    folder = rundir.run_dir(environ)
    exists = _check_run_dir(folder)
    if pool_keys := rundir.choose_keys(endpoint, folder, keys):
        from enginepool.curve import check_pairs  # loads ZeroMQ

        check_pairs(pool_keys)
    if endpoint is not None:
        _check(endpoint, folder, root)
        if holder := find_holder(endpoint, folder, root):
            raise EndpointInUse(f"{endpoint} is held by the pool with pid {holder}; stop it or choose another --endpoint")
        return EndpointFacts(str(folder), exists, endpoint, True, has_keys=keys is not None)
    default = f"ipc://{folder}/default.sock"
    _check(default, folder, root)
    holder = find_holder(default, folder, root)
    if holder is None:
        return EndpointFacts(str(folder), exists, default, False)
    own = f"ipc://{folder}/<pool id>.sock"
    check_endpoint(own.replace("<pool id>", "0" * 12))
    return EndpointFacts(str(folder), exists, own, False, holder)


def find_holder(endpoint: str, folder: Path, root: Path = Path("/")) -> int | None:
    """The pid of the pool that holds an endpoint (0: it doesn't say), or None."""
    lock = rundir.beside(endpoint, folder, "lock")
    try:
        text = lock.read_text(errors="replace").strip()
        pid = int(text) if text.isdecimal() else 0
        inode = lock.stat().st_ino
    except OSError:
        return None
    return pid if _is_secret_locked(rundir.beside(endpoint, folder, "secret")) or _is_in_lock_table(root, pid, inode) else None


def _check_run_dir(folder: Path) -> bool:
    if folder.exists() or folder.is_symlink():
        rundir.check_owner(folder, folder.lstat())
        return True
    if why := why_not_writable(folder):
        raise SettingsError(f"run directory {folder}: {why}; set ENGINEPOOL_RUN_DIR to a writable folder")
    return False


def _check(endpoint: str, folder: Path, root: Path) -> None:
    rundir.refuse_foreign_files(endpoint, folder)
    parent = rundir.beside(endpoint, folder, "lock").parent
    if parent != folder and not parent.is_dir():
        raise SettingsError(f"endpoint {endpoint}: there is no folder {parent}; make it or choose another path")
    if why := why_not_writable(parent):
        raise SettingsError(f"endpoint {endpoint}: {parent}: {why}; choose another path")
    if endpoint.startswith("tcp://"):
        _check_tcp(endpoint, folder, root)


def _check_tcp(endpoint: str, folder: Path, root: Path) -> None:
    back = rundir.back_path(endpoint, folder)
    if len(os.fsencode(back)) > MAX_IPC_PATH_BYTES:
        raise SettingsError(f"endpoint {endpoint}: {back} is too long for a socket; set ENGINEPOOL_RUN_DIR to a shorter one")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not is_near(endpoint) and not _has_address(host):
        raise SettingsError(
            f"endpoint {endpoint}: {os.strerror(errno.EADDRNOTAVAIL)}; write an address of this machine, or all: tcp://{EVERY_INTERFACE}:PORT"
        )
    if int(port) and is_listening(host, int(port), root) and find_holder(endpoint, folder, root) is None:
        raise EndpointInUse(f"{endpoint} is in use by another program; choose another --endpoint")


def _has_address(host: str) -> bool:
    return any(address.address == host for addresses in psutil.net_if_addrs().values() for address in addresses)


def is_listening(host: str, port: int, root: Path = Path("/")) -> bool:
    """Whether some program listens at this IPv4 address or at all addresses; at all addresses one at any is in the way."""
    numbers = (127, 0, 0, 1) if host == "localhost" else tuple(map(int, host.split(".")))
    wanted = bytes(reversed(numbers)).hex().upper()
    is_every = host == EVERY_INTERFACE
    for name in ("tcp", "tcp6"):
        for line in (read_text(root / "proc/self/net" / name) or "").splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            at, _, number = address.partition(":")
            if state == _LISTENING and int(number, 16) == port and (is_every or at[-8:] == wanted or not at.strip("0")):
                return True
    return False


def _is_secret_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_locked(file.fileno())
    except OSError:
        return False


def _is_in_lock_table(root: Path, pid: int, inode: int) -> bool:
    rows = [line.split() for line in (read_text(root / "proc/locks") or "").splitlines()]
    return any(len(row) > 5 and row[1] == "FLOCK" and row[4] == str(pid) and row[5].endswith(f":{inode}") for row in rows)

"""Sweeps the run directory: what a killed pool left there goes with the user's next start, whichever endpoint that has.

Led by the lock files, which live as long as their pools: what belongs to one that nobody holds is removed, and only what
has the form that a pool gives it. Whoever sweeps or claims holds the folder, so a lock that is tried here refuses nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from enginepool.locks import is_locked, is_same_file

SECRET_BYTES = 32
_TCP_LOCK = re.compile(r"(tcp-.+?)(?:\.\d+)?\.lock")
_TCP_SECRET = re.compile(r"tcp-.+-\d+\.secret")


def sweep_run_dir(folder: Path) -> int:
    """Remove the files of pools that no longer live; returns how many. The caller holds the folder (`locks.folder_locked`)."""
    names = sorted(path.name for path in folder.iterdir())
    count = sum(_sweep_pool(folder / name) for name in names if name.endswith(".lock"))
    return count + sum(_remove(folder / name, is_stale_secret) for name in names if _TCP_SECRET.fullmatch(name))


def is_lock(path: Path) -> bool:
    """Whether a file has the form of a pool's lock: it holds a pid, or nothing yet."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return not file.read(SECRET_BYTES).strip(b"0123456789")


def is_secret(path: Path) -> bool:
    """Whether a file has the form of a pool's secret."""
    return path.is_file() and path.stat().st_size == SECRET_BYTES


def is_draft(path: Path) -> bool:
    """Whether a file has the form of a secret that is being written."""
    return path.is_file() and path.stat().st_size in (0, SECRET_BYTES)


def is_stale_secret(path: Path) -> bool:
    """Whether a file has the form of a secret and no pool holds it."""
    if not is_secret(path):
        return False
    with path.open("rb") as file:
        return not is_locked(file.fileno())


def _sweep_pool(lock: Path) -> int:
    """Remove a dead pool's files, its lock last and while it is held here."""
    if not _is_mine(lock) or not is_lock(lock):
        return 0
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_same_file(fd, lock):
            return 0
        return sum(_remove(path, is_ours) for path, is_ours in _files_of(lock, os.pread(fd, SECRET_BYTES, 0).decode()))
    except BlockingIOError:
        return 0
    finally:
        os.close(fd)


def _files_of(lock: Path, pid: str) -> list[tuple[Path, Callable[[Path], bool]]]:
    """The files that belong to a lock, each with what tells that it is a pool's; the secret of any port stands for itself."""
    own = [(lock.with_suffix(".draft"), is_draft), (lock, is_lock)]
    if match := _TCP_LOCK.fullmatch(lock.name):
        return [(lock.with_name(f"{match[1]}-{pid}.back"), Path.is_socket), *own]
    stem = lock.name.removesuffix(".lock")
    return [
        (lock.with_name(stem), Path.is_socket),
        (lock.with_name(f"{stem}.back"), Path.is_socket),
        (lock.with_name(f"{stem}.secret"), is_stale_secret),
        *own,
    ]


def _remove(path: Path, is_ours: Callable[[Path], bool]) -> bool:
    if _is_mine(path) and is_ours(path):
        with suppress(OSError):
            path.unlink()
            return True
    return False


def _is_mine(path: Path) -> bool:
    """Whether it is there, this user's, and no link to elsewhere."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and not stat.S_ISLNK(info.st_mode)

"""File locks: how a pool that lives is told from what a killed one left behind."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_locked(fd: int) -> bool:
    """Whether somebody else holds the file exclusively."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def lock_file(path: Path) -> int:
    """Make and lock a file, and return its descriptor. Raises BlockingIOError when somebody holds it.

    The file that was locked must still be the one at `path`, since its last holder removes it.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Hold a folder against everybody else who does this. Moments only: the others wait."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_same_file(fd: int, path: Path) -> bool:
    """Whether the open file is the one that stands at `path` now."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False

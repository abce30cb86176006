"""Locks on files of a run, so that no two runs write one."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from pathlib import Path

from enginepool.errors import SettingsError


def lock(fd: int, name: str) -> None:
    """Lock an open file until it is closed. Raises SettingsError when another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(f"{name} is being written by another run-batch; wait for it, stop it, or name another output") from None
    except OSError:  # some network file systems have no locks; better to run without than not at all
        pass


def check_free(path: Path) -> None:
    """Raise SettingsError when another process has it locked."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        lock(file.fileno(), str(path))

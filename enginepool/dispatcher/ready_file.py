"""The ready file: the ready line as a file that is there, whole, while the pool is up and takes work."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from enginepool.errors import SettingsError
from enginepool.status import PoolState

LARGEST_BYTES = 1 << 20
STATES = [state.value for state in PoolState]


class ReadyFile:
    """One path, freed at the start of what an earlier pool has left there.

    Raises SettingsError when the folder takes no file, or when something else than a ready file is there.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path.absolute()
        self._warn = warn
        self._text = b""
        try:
            _refuse_other_files(self._path)
            self._draft = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
            self._draft.touch()
            self._draft.unlink()
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"--ready-file {path}: {error.strerror}; give a path in a folder that this user may write to") from None

    def write(self, line: dict[str, Any]) -> None:
        """Let the file appear, whole; where that fails, the pool goes on and a warning says so."""
        try:
            self._text = msgspec.json.encode(line) + b"\n"
            self._draft.write_bytes(self._text)
            self._draft.rename(self._path)
        except OSError as error:
            self._warn(f"warning: --ready-file {self._path} could not be written: {error.strerror}")
            with suppress(OSError):
                self._draft.unlink()

    def withdraw(self) -> None:
        """Remove the file, unless another pool has written its own there since."""
        with suppress(OSError):
            if self._path.read_bytes() == self._text:
                self._path.unlink()


def _refuse_other_files(path: Path) -> None:
    """Raise SettingsError rather than remove a file that no pool has written."""
    with suppress(FileNotFoundError):
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or not _is_ready_line(path):
            raise SettingsError(f"--ready-file {path}: exists and is no ready file; choose another path")


def _is_ready_line(path: Path) -> bool:
    with path.open("rb") as file:
        text = file.read(LARGEST_BYTES)
    try:
        line = msgspec.json.decode(text, type=dict[str, Any]) if text else {"state": "stopped", "pid": 0}
    except msgspec.DecodeError:
        return False
    return line.get("state") in STATES and isinstance(line.get("pid"), int)

"""Where results go: a file that only ever grows by whole lines, or a stream; never one of the files that are read."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from enginepool.errors import EnginePoolError, ExitCode, SettingsError

STDOUT = "-"


class OutputFailed(EnginePoolError):
    """Results can't be written; what was written before stands."""

    exit_code = ExitCode.OUTPUT_FAILED

    def __init__(self, message: str, *, is_closed_pipe: bool = False) -> None:
        super().__init__(message)
        self.is_closed_pipe = is_closed_pipe


class Target:
    """One output that is open for appending. Raises SettingsError when it can't be opened."""

    def __init__(self, name: str) -> None:
        self.name = "standard output" if name == STDOUT else name
        try:
            self.fd = os.dup(sys.__stdout__.fileno()) if name == STDOUT and sys.__stdout__ else _open(name)
            info = os.fstat(self.fd)
        except OSError as error:
            raise SettingsError(f"output {self.name}: {error.strerror}; nothing was started") from None
        self.is_file = stat.S_ISREG(info.st_mode) and name != STDOUT
        self._size = info.st_size if self.is_file else 0
        self._is_dirty = False

    def append(self, lines: Iterable[bytes]) -> None:
        """Write whole lines. Raises OutputFailed; then nothing of a torn line is left in a file."""
        data = b"".join(lines)
        try:
            self._write(data)
        except OSError as error:
            self._drop_torn()
            is_closed = isinstance(error, BrokenPipeError)
            raise OutputFailed(f"output {self.name}: {error.strerror}", is_closed_pipe=is_closed) from None
        self._size += len(data)
        self._is_dirty = True

    def sync(self) -> None:
        """Make what was written durable. Raises OutputFailed."""
        if self._is_dirty and self.is_file:
            try:
                os.fsync(self.fd)
            except OSError as error:
                raise OutputFailed(f"output {self.name}: {error.strerror}") from None
        self._is_dirty = False

    def close(self) -> None:
        """Let it go."""
        os.close(self.fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def _drop_torn(self) -> None:
        if self.is_file:
            os.ftruncate(self.fd, self._size)


def _open(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC if is_file_or_new(name) else os.O_WRONLY | os.O_CLOEXEC, 0o666)


def is_file_or_new(name: str) -> bool:
    """Whether an output is a file, so that its run can be continued; pipes and devices take results once."""
    if name == STDOUT:
        return False
    try:
        return stat.S_ISREG(os.stat(name).st_mode)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise SettingsError(f"output {name}: {error.strerror}; nothing was started") from None


def resolve(name: str) -> str:
    """The path behind links, so that what is renamed over it takes the file's place and not the link's."""
    return name if not is_file_or_new(name) else os.path.realpath(name)


def check_distinct(files: dict[str, str | None]) -> None:
    """Raise SettingsError where two of the named files are one, by name, by link or by inode; the first is the input."""
    seen: list[tuple[str, str, os.stat_result | None]] = []
    for role, name in files.items():
        if name is None or name == STDOUT:
            continue
        path = os.path.realpath(name)
        try:
            info = os.stat(path)
        except OSError:
            info = None
        for other, other_path, other_info in seen:
            is_same = path == other_path or (info is not None and other_info is not None and os.path.samestat(info, other_info))
            if is_same and (info is None or stat.S_ISREG(info.st_mode)):
                raise SettingsError(f"{role} {name} is the same file as {other}; nothing was touched")
        seen.append((role, path, info))


def check_folder(role: str, name: str | None) -> None:
    """Raise SettingsError when nothing can be written beside `name`."""
    if name is None or name == STDOUT:
        return
    folder = Path(name).resolve().parent
    if not folder.is_dir():
        raise SettingsError(f"{role} {name}: there is no folder {folder}; nothing was started")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{role} {name}: the folder {folder} can not be written to; nothing was started")

"""Where results go: a file that only ever grows by whole lines, or a stream; never one of the files that are read."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from enginepool.batch.file_lock import lock
from enginepool.errors import EnginePoolError, ExitCode, SettingsError

STDOUT = "-"
PIECE_BYTES = 4096
"""What a pipe takes at once when it says that it takes anything."""
POLL_MS = 200


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
        self.gives_up: Callable[[], bool] = lambda: False
        """Asked while a pipe takes nothing: True ends the waiting."""
        try:
            self.fd = _dup_stdout() if name == STDOUT else _open(name)
            info = os.fstat(self.fd)
        except OSError as error:
            raise SettingsError(f"output {self.name}: {error.strerror}; nothing was started") from None
        self.is_file = stat.S_ISREG(info.st_mode) and name != STDOUT
        self._size = info.st_size if self.is_file else 0
        self._is_dirty = False
        if self.is_file:
            lock(self.fd, self.name)
        self._poll = select.poll()
        if not self.is_file:
            self._poll.register(self.fd, select.POLLOUT)

    def append(self, lines: Iterable[bytes]) -> None:
        """Write whole lines. Raises OutputFailed; then nothing of a torn line is left in a file."""
        data = b"".join(lines)
        try:
            self._write(data)
        except OSError as error:
            with suppress(OSError):
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
            view = view[os.write(self.fd, view) if self.is_file else self._write_some(view[:PIECE_BYTES]) :]

    def _write_some(self, piece: memoryview) -> int:
        """What a stream takes now; never waits in the kernel, where a second Ctrl-C would not be seen."""
        while not self._poll.poll(POLL_MS):
            if self.gives_up():
                raise BlockingIOError(errno.EAGAIN, "nobody reads it any more")
        try:
            return os.write(self.fd, piece)
        except BlockingIOError:  # somebody has made it so, and there is no room after all
            return 0

    def _drop_torn(self) -> None:
        if self.is_file:
            os.ftruncate(self.fd, self._size)


def _dup_stdout() -> int:
    if sys.__stdout__ is None:
        raise OSError(errno.EBADF, "it is closed")
    return os.dup(sys.__stdout__.fileno())


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
        if name is None or (name == STDOUT and sys.__stdout__ is None):
            continue
        path = STDOUT if name == STDOUT else os.path.realpath(name)
        info = _stat(path)
        for other, other_path, other_info in seen:
            is_same = path == other_path or (info is not None and other_info is not None and os.path.samestat(info, other_info))
            if is_same and (info is None or stat.S_ISREG(info.st_mode)):
                raise SettingsError(f"{role} {name} is the same file as {other}; nothing was touched")
        seen.append((role, path, info))


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.fstat(sys.__stdout__.fileno()) if path == STDOUT and sys.__stdout__ else os.stat(path)
    except (OSError, ValueError):
        return None


def check_folder(role: str, name: str | None) -> None:
    """Raise SettingsError when nothing can be written beside `name`."""
    if name is None or name == STDOUT:
        return
    folder = Path(name).resolve().parent
    if not folder.is_dir():
        raise SettingsError(f"{role} {name}: there is no folder {folder}; nothing was started")
    if Path(name).is_dir():
        raise SettingsError(f"{role} {name} is a folder; nothing was started")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{role} {name}: the folder {folder} can't be written to; nothing was started")

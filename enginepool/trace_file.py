"""The trace file: a JSON array that grows as items end, and never costs its writer more than the trace.

Events are buffered until they are flushed. The array is closed at the end; after a SIGKILL the closing bracket is missing,
which viewers forgive.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from enginepool.errors import SettingsError
from enginepool.trace_event import Event

MAX_BUFFERED_BYTES = 4 << 20
_encode = msgspec.json.Encoder().encode


class TraceFile:
    """Appends events to a file; the first failure ends the trace with one warning, and `owner` goes on.

    Raises SettingsError when it can't be opened.
    """

    def __init__(self, path: str, warn: Callable[[str], None], owner: str = "pool") -> None:
        self._path = path
        self._warn = warn
        self._owner = owner
        self._fd: int | None = _open(path)
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._written = 0
        self._before = b"[\n"

    def add(self, events: Iterable[Event]) -> None:
        """Buffer events; a full buffer is written at once."""
        for event in events:
            data = _encode(event)
            self._parts += (self._before, data)
            self._num_bytes += len(data) + 2
            self._before = b",\n"
        if self._num_bytes >= MAX_BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        fd = self._fd
        if fd is None or not data:
            return
        view = memoryview(data)
        if not self._written:
            with suppress(OSError):  # a pipe or a device has no length
                os.ftruncate(fd, 0)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError as error:
            self._give_up(fd, error)
        else:
            self._written += len(data)

    def close(self) -> None:
        """End the array."""
        if self._fd is not None:
            self._parts.append(b"\n]\n")
            self.flush()
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _give_up(self, fd: int, error: OSError) -> None:
        """What was written before stays loadable: half an event is cut off again."""
        with suppress(OSError):
            os.ftruncate(fd, self._written)
        os.close(fd)
        self._fd = None
        self._warn(f"warning: trace {self._path}: {error.strerror}; the trace ends here, the {self._owner} goes on")


def _open(path: str) -> int:
    """Open for writing, for this writer alone, without waiting for a pipe's reader; it is emptied by the first write, not before."""
    try:
        fd = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: `~` of an unknown user
        raise SettingsError(f"trace {path}: {error.strerror if isinstance(error, OSError) else error}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SettingsError(f"trace {path}: another pool or run writes its trace there; choose another file") from None
    return fd

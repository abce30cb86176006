"""What a parent program is told by descriptor: start-up stages as they pass, and one line when the pool is up or has failed."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import msgspec


class Announcer:
    """Writes JSON lines; a reader that has gone is not an error, and each line goes out in one write."""

    def __init__(self, ready_fd: int | None, stages_fd: int | None) -> None:
        self._ready_fd = ready_fd
        self._stages_fd = stages_fd

    def stage(self, worker: int, text: str) -> None:
        """A worker has reached a start-up milestone."""
        if self._stages_fd is not None:
            _write(self._stages_fd, {"worker": worker, "stage": text})

    def ready(self, line: dict[str, Any]) -> None:
        """The pool is up or has failed for good: the one line of the ready descriptor, then both are closed."""
        for fd in (self._stages_fd, self._ready_fd):
            if fd is not None:
                if fd == self._ready_fd:
                    _write(fd, line)
                with suppress(OSError):
                    os.close(fd)
        self._ready_fd = self._stages_fd = None


def _write(fd: int, line: dict[str, Any]) -> None:
    data = msgspec.json.encode(line) + b"\n"
    with suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]

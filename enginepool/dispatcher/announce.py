"""What a parent program is told: start-up stages as they pass, and one line when the pool is up or has failed."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import msgspec

from enginepool.dispatcher.ready_file import ReadyFile


class Announcer:
    """Writes JSON lines; a reader that has gone is not an error, and each line goes out in one write."""

    def __init__(self, ready_fd: int | None, stages_fd: int | None) -> None:
        self.file: ReadyFile | None = None
        self._ready_fd = ready_fd
        self._stages_fd = stages_fd
        self._is_told = False
        self._is_up = False

    def stage(self, worker: int, text: str) -> None:
        """A worker has reached a start-up milestone."""
        if self._stages_fd is not None:
            _write(self._stages_fd, {"worker": worker, "stage": text})

    def ready(self, line: dict[str, Any]) -> None:
        """The pool is up or has failed for good: told once, in the ready file and on the ready descriptor, then both are closed."""
        if self._is_told:
            return
        self._is_told = True
        self._is_up = "error" not in line
        if self.file is not None:
            self.file.write(line)
        for fd in (self._stages_fd, self._ready_fd):
            if fd is not None:
                if fd == self._ready_fd:
                    _write(fd, line)
                with suppress(OSError):
                    os.close(fd)
        self._ready_fd = self._stages_fd = None

    def withdraw(self) -> None:
        """The pool takes no work any more: the ready file goes, unless it tells of a failure."""
        if self.file is not None and self._is_up:
            self.file.withdraw()


def _write(fd: int, line: dict[str, Any]) -> None:
    data = msgspec.json.encode(line) + b"\n"
    with suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]

"""The standard streams of a run: a closed one is filled, and a stderr that nobody reads makes nothing wait or fail."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress

PIECE_BYTES = 1024
PATIENCE_MS = 100


def settle_standard_streams() -> None:
    """Put /dev/null where a standard descriptor is closed: a log would be written into whatever file got that number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = Aside(2)


class Aside(io.TextIOBase):
    """A stderr that leaves out what can't be written now: a full pipe, one without a reader, a terminal that is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """What a terminal that draws has to know."""
        return sys.__stderr__.encoding if sys.__stderr__ else "utf-8"

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """It takes whatever comes."""
        return True

    def write(self, text: str) -> int:
        """Write at once, or not at all; what was begun is finished where that takes but a moment."""
        data = text.encode(self.encoding, "backslashreplace")
        wait_ms = 0
        with suppress(OSError):
            while data and self._poll.poll(wait_ms):
                data, wait_ms = data[os.write(self._fd, data[:PIECE_BYTES]) :], PATIENCE_MS
        return len(text)

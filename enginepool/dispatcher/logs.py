"""Log lines of the dispatcher and its workers, written to stderr without ever blocking the loop."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from enginepool.dispatcher.log_lines import Level, json_line, text_line

MAX_QUEUED_LINES = 2000
PIPE_BUF = select.PIPE_BUF
TAIL_LINES = 60


class LogWriter:
    """A bounded queue before a descriptor that may be full, closed or a terminal on hold."""

    def __init__(self, fd: int = 2, *, as_json: bool = False) -> None:
        self.num_dropped = 0
        self._layout = json_line if as_json else text_line
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._is_closed = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def tell(self, level: Level, text: str, *, pid: int | None, worker: int | None = None) -> None:
        """Queue one message in the chosen format; `worker` None is the dispatcher."""
        self.line(self._layout(time.time(), level, worker, pid, text))

    def line(self, text: str) -> None:
        """Queue one line and write what can be written now."""
        if self._is_closed:
            return
        if len(self._queue) >= MAX_QUEUED_LINES:
            self.num_dropped += 1
            return
        data = (text + "\n").encode("utf-8", "backslashreplace")
        self._queue.extend(data[start : start + PIPE_BUF] for start in range(0, len(data), PIPE_BUF))
        self.flush()

    def flush(self) -> bool:
        """Write while the descriptor takes it; True while some is left. A write of up to PIPE_BUF bytes after POLLOUT does not block."""
        while self._queue and not self._is_closed:
            ready = self._poll.poll(0)
            if not ready:
                return True
            if not ready[0][1] & select.POLLOUT:
                self._close()
                break
            try:
                written = os.write(self._fd, self._queue[0])
            except OSError:
                self._close()
                break
            rest = self._queue.popleft()[written:]
            if rest:
                self._queue.appendleft(rest)
        return False

    def _close(self) -> None:
        self._is_closed = True
        self._queue.clear()


class WorkerLog:
    """One worker process's output: split into lines, the tail kept for error reports."""

    def __init__(self) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take what was read; returns the lines that are complete now (carriage returns start a line anew)."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 65536:
            lines.append(self._rest)
            self._rest = b""
        texts = [text for line in lines if (text := _clean(line))]
        self.tail.extend(texts)
        return texts

    def finish(self) -> list[str]:
        """The last line even without its newline."""
        return self.feed(b"\n") if self._rest else []


def _clean(line: bytes) -> str:
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace").rstrip()

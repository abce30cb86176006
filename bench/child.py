"""A helper process of a benchmark: started with a mask and an environment, talked to by messages, surely ended.

The process gets one end of a socket pair as the descriptor in its last argument; what it prints goes to a file that is
shown when it fails.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
TAIL_BYTES = 4000


class Child:
    """One started helper script. Use it in a `with` block; leaving the block kills its whole process group."""

    def __init__(
        self, script: str, arguments: Sequence[str] = (), *, env: Mapping[str, str] | None = None, cpus: Sequence[int] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                preexec_fn=None if cpus is None else lambda: os.sched_setaffinity(0, cpus),
            )

    def ask(self, message: Any, timeout_s: float = 900.0) -> Any:
        """Send a message and wait for the answer."""
        self.connection.send(message)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = 900.0) -> Any:
        """Wait for a message. Raises RuntimeError with the end of its output when the process fails."""
        try:
            if self.connection.poll(timeout_s):
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        raise RuntimeError(f"{self.process.args!r} did not answer; the end of its output:\n{self._tail()}")

    def end(self) -> None:
        """Kill the group and reap."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end()

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - TAIL_BYTES))
        return self._log.read().decode(errors="replace")

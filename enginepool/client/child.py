"""The dispatcher as a child process: started through `enginepool serve`, watched by descriptor, ended with nothing left.

No signal handler is installed and nothing is forked here: a fresh interpreter gets the settings by descriptor, so a
script without a main guard, a notebook cell and `python - < script` all work.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress

from enginepool import handover
from enginepool.config import PoolSettings

KILL_WAIT_S = 5.0


class Child:
    """One dispatcher. Its descriptors stay open until `release`, so that a watcher never holds a foreign one.

    Made first and started then, so that an interrupt at the very end of the start leaves nobody without what to `end`.
    """

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_fd = self.stages_fd = self.exit_fd = -1
        self._lifeline: list[int] = []  # lists, because their pop is atomic: two threads never close one number twice
        self._watched: list[int] = []

    def start(self, settings: PoolSettings) -> None:
        """Start it. Whoever sees this fail or be interrupted calls `end`."""
        lifeline_read, lifeline_write = _pipe()
        self._lifeline.append(lifeline_write)
        self.ready_fd, ready_write = _pipe()
        self.stages_fd, stages_write = _pipe()
        self._watched += [self.ready_fd, self.stages_fd]
        fds = {"settings": _above_standard(handover.put(settings)), "ready": ready_write, "stages": stages_write, "lifeline": lifeline_read}
        argv = [sys.executable, "-P", "-m", "enginepool", "serve", "--die-with-parent", "--parent-pid", str(os.getpid())]
        for name, fd in fds.items():
            argv += [f"--{name}-fd", str(fd)]
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0, pass_fds=tuple(fds.values())
            )
        finally:
            _close_all(list(fds.values()))
        self.exit_fd = _above_standard(os.pidfd_open(self.process.pid))
        self._watched.append(self.exit_fd)
        for fd in (self.ready_fd, self.stages_fd):
            os.set_blocking(fd, False)

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a forked child did not."""
        return os.getpid() == self.owner_pid

    @property
    def exit_code(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return None if self.process is None else self.process.poll()

    def read(self, fd: int) -> tuple[bytes, bool]:
        """Read what is there without blocking; also whether that was the last."""
        data = b""
        while True:
            try:
                more = os.read(fd, 65536)
            except BlockingIOError:
                return data, False
            if not more:
                return data, True
            data += more

    def signal(self, number: signal.Signals) -> None:
        """Signal the dispatcher alone; by descriptor, so never somebody who has got its number since."""
        if self.exit_fd < 0:  # ended and released
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fd, number)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for its exit; False at the timeout."""
        try:
            if self.process is not None:
                self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self.cut_lifeline()
        return True

    def kill(self) -> None:
        """End it now: the lifeline's end makes it kill its workers; should it not react, it is killed and they follow."""
        self.cut_lifeline()
        if self.process is None or not self.is_ours or self.process.returncode is not None:
            return
        if not self.wait(KILL_WAIT_S):
            self.kill_group()
            self.process.wait()

    def kill_group(self) -> None:
        """SIGKILL to a dispatcher that did not react; its workers follow it."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def release(self) -> None:
        """Close the descriptors; nobody may be watching them any more."""
        self.ready_fd = self.stages_fd = self.exit_fd = -1
        _close_all(self._watched)

    def end(self) -> None:
        """Kill and release; what a finalizer calls."""
        self.kill()
        self.release()

    def cut_lifeline(self) -> None:
        """Tell it that this program is gone, and return at once."""
        _close_all(self._lifeline)


def _pipe() -> tuple[int, int]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    return _above_standard(read_fd), _above_standard(write_fd)


def _above_standard(fd: int) -> int:
    """Where the host has closed a standard descriptor, a new one takes its number, and the child's own would overwrite it."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _close_all(fds: list[int]) -> None:
    with suppress(IndexError):
        while True:
            os.close(fds.pop())

"""An embedded pool: a dispatcher started as a child of this program, through the same command as `enginepool serve`.

No signal handler is installed and nothing is forked here: a fresh interpreter gets the settings by descriptor, so a
script without a main guard, a notebook cell and `python - < script` all work.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import msgspec

from enginepool import errors, handover
from enginepool.client.progress import LoadingView
from enginepool.config import PoolSettings

KILL_WAIT_S = 5.0


class EmbeddedDispatcher:
    """The dispatcher process that this program owns."""

    def __init__(self, settings: PoolSettings, *, progress: bool) -> None:
        self._owner_pid = os.getpid()
        self._lifeline_fd = self._ready_fd = self._stages_fd = -1
        self.process: subprocess.Popen[bytes] | None = None
        view = LoadingView(is_shown=progress)
        try:
            self._start(settings)
            self.ready = self._wait_ready(view)
        except BaseException:
            self.kill()
            raise
        finally:
            view.close()
            _close(self._ready_fd, self._stages_fd)

    def _start(self, settings: PoolSettings) -> None:
        lifeline_read, self._lifeline_fd = _pipe()
        self._ready_fd, ready_write = _pipe()
        self._stages_fd, stages_write = _pipe()
        fds = {"settings": _above_standard(handover.put(settings)), "ready": ready_write, "stages": stages_write, "lifeline": lifeline_read}
        argv = [sys.executable, "-P", "-m", "enginepool", "serve", "--die-with-parent", "--parent-pid", str(os.getpid())]
        for name, fd in fds.items():
            argv += [f"--{name}-fd", str(fd)]
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0, pass_fds=tuple(fds.values())
            )
        finally:
            _close(*fds.values())

    def wait(self, timeout_s: float) -> bool:
        """Wait for the dispatcher's exit; False at the timeout."""
        try:
            if self.process is not None:
                self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close_lifeline()
        return True

    def kill(self) -> None:
        """End it now: the lifeline's end makes it kill its workers; should it not react, it is killed and they follow."""
        self._close_lifeline()
        if self.process is None or os.getpid() != self._owner_pid or self.process.returncode is not None:
            return
        if not self.wait(KILL_WAIT_S):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _close_lifeline(self) -> None:
        fd, self._lifeline_fd = self._lifeline_fd, -1
        _close(fd)

    def _wait_ready(self, view: LoadingView) -> dict[str, Any]:
        """Read stages until the one ready line comes; silence for longer than the start limit ends the wait."""
        ready, stages = b"", b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ready_fd, selectors.EVENT_READ)
            selector.register(self._stages_fd, selectors.EVENT_READ)
            while b"\n" not in ready:
                for key, _ in selector.select():
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    if key.fd == self._ready_fd:
                        ready += data
                        if not data:
                            raise self._died_early()
                    else:
                        *lines, stages = (stages + data).split(b"\n")
                        for line in lines:
                            told = msgspec.json.decode(line)
                            view.stage(told["worker"], told["stage"])
        line = msgspec.json.decode(ready)
        if "error" in line:
            assert self.process is not None
            self.process.wait()
            raise _error_for(int(line["exit_code"]), str(line["error"]))
        return dict(line)

    def _died_early(self) -> errors.PoolError:
        assert self.process is not None
        code = self.process.wait()
        return errors.StartError(f"the dispatcher ended with status {code} before the pool was up; its messages are on stderr")


def _error_for(exit_code: int, text: str) -> errors.EnginePoolError:
    """The exception that stands for a dispatcher's exit code."""
    kinds: dict[int, type[errors.EnginePoolError]] = {
        errors.ExitCode.USAGE: errors.SettingsError,
        errors.ExitCode.ENGINE_MISSING: errors.EngineMissing,
    }
    return kinds.get(exit_code, errors.StartError)(text)


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


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)

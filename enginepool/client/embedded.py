"""An embedded pool: a dispatcher started as a child of this program, through the same command as `enginepool serve`.

No signal handler is installed and nothing is forked here: a fresh interpreter gets the settings by descriptor, so a
script without a main guard, a notebook cell and `python - < script` all work.
"""

from __future__ import annotations

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
        self._settings = settings
        self._owner_pid = os.getpid()
        lifeline_read, self._lifeline_fd = os.pipe2(os.O_CLOEXEC)
        self._ready_fd, ready_write = os.pipe2(os.O_CLOEXEC)
        self._stages_fd, stages_write = os.pipe2(os.O_CLOEXEC)
        settings_fd = handover.put(settings)
        fds = {"settings": settings_fd, "ready": ready_write, "stages": stages_write, "lifeline": lifeline_read}
        try:
            argv = [sys.executable, "-m", "enginepool", "serve", "--die-with-parent", "--parent-pid", str(os.getpid())]
            for name, fd in fds.items():
                argv += [f"--{name}-fd", str(fd)]
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0, pass_fds=tuple(fds.values())
            )
        finally:
            for fd in fds.values():
                os.close(fd)
        view = LoadingView(is_shown=progress)
        try:
            self.ready = self._wait_ready(view)
        except BaseException:
            self.kill()
            raise
        finally:
            view.close()
            os.close(self._ready_fd)
            os.close(self._stages_fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the dispatcher's exit; False at the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._close_lifeline()
        return True

    def kill(self) -> None:
        """End it now: the lifeline's end makes it kill its workers; should it not react, it is killed and they follow."""
        self._close_lifeline()
        if os.getpid() != self._owner_pid or self.process.returncode is not None:
            return
        if not self.wait(KILL_WAIT_S):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _close_lifeline(self) -> None:
        fd, self._lifeline_fd = self._lifeline_fd, -1
        if fd >= 0:
            os.close(fd)

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
            self.process.wait()
            raise _error_for(int(line["exit_code"]), str(line["error"]))
        return dict(line)

    def _died_early(self) -> errors.PoolError:
        code = self.process.wait()
        return errors.StartError(f"the dispatcher ended with status {code} before the pool was up; its messages are on stderr")


def _error_for(exit_code: int, text: str) -> errors.EnginePoolError:
    """The exception that stands for a dispatcher's exit code."""
    kinds: dict[int, type[errors.EnginePoolError]] = {
        errors.ExitCode.USAGE: errors.SettingsError,
        errors.ExitCode.ENGINE_MISSING: errors.EngineMissing,
    }
    return kinds.get(exit_code, errors.StartError)(text)

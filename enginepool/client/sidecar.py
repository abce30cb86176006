"""Sidecar: a dispatcher process that this program starts, waits for and ends; `Pool` starts its own through here.

The waiting is a loop over descriptors that anybody may run, an event loop included::

    sidecar.start()
    until feed() says True:  watch sidecar.fds, give each readable one to sidecar.feed(fd), watch sidecar.fds anew
    sidecar.outcome()        the ready line, or the reason as an exception
"""

from __future__ import annotations

import os
import selectors
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from signal import Signals
from typing import Any, Literal, Self

import msgspec

from enginepool.client.child import KILL_WAIT_S, Child
from enginepool.client.connection import Connection
from enginepool.client.loading import make_loading_view
from enginepool.client.requests import check_seconds
from enginepool.client.settings import make_settings
from enginepool.clock import monotonic
from enginepool.config import PoolSettings
from enginepool.errors import (
    EndpointInUse,
    EngineMissing,
    EnginePoolError,
    ExitCode,
    ForkedPool,
    InvalidRequest,
    SettingsError,
    StartError,
    StartTimeout,
)
from enginepool.protocol import Drain, Message, Stop

STOP_GRACE_S = 2.0


class Sidecar:
    """A pool's dispatcher as a child process of this program. It ends with this program, however that ends.

    Takes what `Pool` takes: `Sidecar(model, workers=2, **engine_args)`, every setting and every vLLM engine argument by
    its name. Raises SettingsError for a bad one. Nothing is started before `start`, or `with sidecar:`, which also waits
    until it is up, drains at the end, and stops at once when the block raises. `on_stage`, when set, is called with worker
    and text of each start-up stage. Thread-safe.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        workers: int | Literal["auto"] = "auto",
        engine: Literal["vllm", "echo"] = "vllm",
        **settings_and_engine_args: Any,
    ) -> None:
        self._hold(make_settings(model, workers=workers, engine=engine, **settings_and_engine_args))

    @classmethod
    def of(cls, settings: PoolSettings) -> Self:
        """Make one from settings that are built already."""
        sidecar = cls.__new__(cls)
        sidecar._hold(settings)
        return sidecar

    def _hold(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.on_stage: Callable[[int, str], None] | None = None
        self._child: Child | None = None
        self._ready: dict[str, Any] | None = None
        self._read = {"ready": b"", "stages": b""}
        self._ended: set[int] = set()
        self._lock = threading.RLock()
        self._waiting = threading.Lock()

    def start(self) -> None:
        """Start the process and return at once. Raises InvalidRequest when it was started before."""
        with self._lock:
            if self._child is not None:
                raise InvalidRequest("this Sidecar was started before; make a new one")
            self._child = child = Child()
            weakref.finalize(self, child.end)
            try:
                child.start(self.settings)
            except BaseException:
                child.end()
                self._child = None
                raise

    def wait_until_up(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the pool is up; returns its ready line.

        Raises StartError when it can't come up (EngineMissing, SettingsError by its cause), and StartTimeout at
        `timeout_s`: then it goes on starting, and one may wait again.
        """
        timeout_s = check_seconds("timeout_s", timeout_s)
        deadline = None if timeout_s is None else monotonic() + timeout_s
        child = self._mine()
        if not self._waiting.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise self._not_yet(timeout_s)
        try:
            self._watch(timeout_s, deadline)
        finally:
            self._waiting.release()
            if child.exit_code is not None:
                self._release(child)
        return self.outcome()

    def _watch(self, timeout_s: float | None, deadline: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in self.fds:
                selector.register(fd, selectors.EVENT_READ)
            while self.fds:
                events = selector.select(None if deadline is None else max(0.0, deadline - monotonic()))
                for key, _ in events:
                    self.feed(key.fd)
                for ended in set(selector.get_map()) - set(self.fds):
                    selector.unregister(ended)
                if not events and deadline is not None and monotonic() >= deadline:
                    raise self._not_yet(timeout_s)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors to watch for reading while it starts; one that has ended is left out, and none is left in the end."""
        child = self._child
        if child is None or self.is_settled:
            return ()
        return tuple(fd for fd in (child.ready_fd, child.stages_fd, child.exit_fd) if fd >= 0 and fd not in self._ended)

    def feed(self, fd: int) -> bool:
        """Read what there is at one of `fds`, without blocking; True once it is settled whether the pool came up."""
        child = self._mine()
        with self._lock:
            if fd == child.exit_fd and child.exit_code is not None:  # what it said last is read before its exit counts
                self._take(child, child.stages_fd)
                self._take(child, child.ready_fd)
            elif fd in (child.ready_fd, child.stages_fd):
                self._take(child, fd)
            return self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether the pool has come up, or has ended without."""
        return self._ready is not None or self.exit_code is not None

    def outcome(self) -> dict[str, Any]:
        """The ready line, once settled; raises as `wait_until_up` does when the pool did not come up."""
        child = self._mine()
        code = child.exit_code
        if code is not None:
            self.feed(child.exit_fd)
        if self._ready is not None:
            return self._ready
        if code is None:
            raise InvalidRequest("the pool is still starting: wait_until_up, or feed what fds say until it is True")
        self._release(child)
        text = self._read["ready"]
        if not text.endswith(b"\n"):
            raise StartError(f"the dispatcher ended with status {code} before the pool was up; its messages are on stderr")
        raise _error_for(msgspec.json.decode(text))

    @property
    def ready(self) -> dict[str, Any] | None:
        """The ready line (docs/sidecar.md lists its keys), None until the pool is up."""
        return self._ready

    @property
    def endpoint(self) -> str:
        """Where the pool listens; what `Pool.connect` takes. Raises InvalidRequest until it is up."""
        if self._ready is None:
            raise InvalidRequest("the pool is not up yet: wait_until_up first")
        return str(self._ready["endpoint"])

    @property
    def pid(self) -> int | None:
        """The dispatcher's pid, None before the start."""
        return None if self._child is None or self._child.process is None else self._child.process.pid

    @property
    def exit_fd(self) -> int:
        """Readable once the process has exited, the pool's later failures included; −1 before `start` and after the end."""
        return -1 if self._child is None else self._child.exit_fd

    @property
    def exit_code(self) -> int | None:
        """Its exit status (negative: a signal), None while it runs and before the start. Never blocks."""
        return None if self._child is None else self._child.exit_code

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.exit_code

    def begin_drain(self) -> None:
        """Ask it to drain within its `drain_timeout_s`, and return at once; SIGTERM does the same."""
        self._mine().signal(Signals.SIGTERM)

    def drain(self, limit_s: float | None = None) -> int:
        """Let it finish what it has, within `limit_s` (default: its `drain_timeout_s`), and wait until it has ended.

        Returns the exit code: 0, or 7 when the limit was hit and the rest was returned as retryable. The limit of the first
        drain stands. While starting there is nothing to finish, so it stops.
        """
        child = self._mine()
        limit_s = check_seconds("limit_s", limit_s)
        if limit_s is None or not self._tell(Drain(limit_s)):
            self.begin_drain()
        longest_s = self.settings.drain_timeout_s if limit_s is None else limit_s
        child.wait(longest_s + self.settings.shutdown_timeout_s + KILL_WAIT_S)
        return self._end(child)

    def stop(self) -> int:
        """Stop it now: unfinished items are returned as retryable; workers get `shutdown_timeout_s`. Returns the exit code."""
        child = self._mine()
        if self._tell(Stop()):
            child.wait(self.settings.shutdown_timeout_s + STOP_GRACE_S)
        return self._end(child)

    def kill(self) -> None:
        """End it without a word to anybody, workers included; does nothing in a forked child or when it has ended."""
        child = self._child
        if child is not None and child.is_ours and child.process is not None:
            self._end(child)

    def begin_kill(self) -> None:
        """Cut its lifeline, so that it kills its workers and ends, and return at once."""
        if self._child is not None and self._child.is_ours:
            self._child.cut_lifeline()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its exit; False at the timeout."""
        return self._mine().wait(timeout_s)

    def __enter__(self) -> Sidecar:
        try:
            self.start()
            self.wait_until_up()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
            else:
                self.stop()
        finally:  # an interrupted drain must not leave it running
            self.kill()

    def __repr__(self) -> str:
        code = self.exit_code
        state = "not started" if self._child is None else f"ended with {code}" if code is not None else f"pid {self.pid}"
        return f"<Sidecar {state}{f' at {self.endpoint}' if self._ready is not None else ''}>"

    def _mine(self) -> Child:
        if self._child is None:
            raise InvalidRequest("this Sidecar was not started; call start() first")
        if not self._child.is_ours:
            raise ForkedPool("this Sidecar belongs to the parent process; in a forked child use Pool.connect(endpoint)")
        return self._child

    def _take(self, child: Child, fd: int) -> None:
        """Read a pipe to where it stands now; the lock is held."""
        if fd < 0 or fd in self._ended:
            return
        data, is_last = child.read(fd)
        if is_last:
            self._ended.add(fd)
        if fd == child.ready_fd:
            self._take_ready(data)
        else:
            self._take_stages(data)

    def _take_ready(self, data: bytes) -> None:
        text = self._read["ready"] = self._read["ready"] + data
        if self._ready is None and text.endswith(b"\n"):
            line = msgspec.json.decode(text)
            self._ready = None if "error" in line else line

    def _take_stages(self, data: bytes) -> None:
        *lines, self._read["stages"] = (self._read["stages"] + data).split(b"\n")
        for line in lines:
            told = msgspec.json.decode(line)
            if self.on_stage is not None:
                self.on_stage(told["worker"], told["stage"])

    def _tell(self, message: Message) -> bool:
        """Send a message to a pool that is up; False where there is none to tell."""
        child = self._mine()
        self.feed(child.ready_fd)
        if self._ready is None or child.exit_code is not None:
            return False
        try:
            connection = Connection(self.endpoint, keys=self.settings.keys)
        except EnginePoolError:
            return False
        try:
            connection.post(message)
        except EnginePoolError:
            return False
        finally:
            connection.close()
        return True

    def _end(self, child: Child) -> int:
        child.kill()
        self._release(child)
        code = child.exit_code
        assert code is not None
        return code

    def _release(self, child: Child) -> None:
        """Close the descriptors, unless a thread waits on them: it will, once it has seen the end."""
        if self._waiting.acquire(blocking=False):
            try:
                self.feed(child.exit_fd)
                child.release()
            finally:
                self._waiting.release()

    def _not_yet(self, timeout_s: float | None) -> StartTimeout:
        return StartTimeout(f"the pool (pid {self.pid}) is not up after {timeout_s:g} s and goes on starting; wait again, or stop it")


def start_shown(settings: PoolSettings, *, progress: bool | None) -> Sidecar:
    """Start a sidecar and wait until it is up, showing its stages; nothing is left of one that does not come up."""
    sidecar = Sidecar.of(settings)
    view = make_loading_view(progress, None if settings.workers == "auto" else settings.workers)
    sidecar.on_stage = view.stage
    try:
        sidecar.start()
        while not sidecar.is_settled:
            with suppress(StartTimeout):
                sidecar.wait_until_up(view.tick_s)
            view.tick()
        sidecar.outcome()
    except BaseException:
        sidecar.kill()
        raise
    finally:
        view.close()
    return sidecar


def _error_for(line: dict[str, Any]) -> EnginePoolError:
    """The exception that stands for a ready line that tells of a failure: by its exit code, and one code has two."""
    kinds: dict[int, type[EnginePoolError]] = {ExitCode.USAGE: SettingsError, ExitCode.ENGINE_MISSING: EngineMissing}
    kind = EndpointInUse if line.get("error_type") == EndpointInUse.__name__ else kinds.get(line["exit_code"], StartError)
    return kind(line["error"])

"""AsyncSidecar: a sidecar for an event loop. What waits for the process here waits on its descriptors and blocks no thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

from enginepool.client.child import KILL_WAIT_S
from enginepool.client.requests import check_seconds
from enginepool.client.sidecar import Sidecar
from enginepool.errors import ExitCode

DRAIN_GRACE_S = 5.0


class AsyncSidecar(Sidecar):
    """A `Sidecar` that can be awaited: `up`, `exited`, `drained` and `killed`, each by several tasks if need be.

    `async with AsyncSidecar(model, workers=2, **engine_args) as sidecar:` starts it, waits until it is up, drains it at the end,
    and kills it when the block raises.
    """

    async def up(self) -> dict[str, Any]:
        """Wait until the pool is up; returns its ready line and raises as `wait_until_up` does. Cancelled, it goes on starting."""
        self._mine()
        with _Watch() as watch:
            watch.add(self.fds)
            while not self.is_settled:
                for fd in await watch.readable():
                    self.feed(fd)
                watch.keep(self.fds)
        return self.outcome()

    async def exited(self, timeout_s: float | None = None) -> bool:
        """Wait for its exit; False at the timeout."""
        timeout_s = check_seconds("timeout_s", timeout_s)
        self._mine()
        if self.exit_code is not None:
            return True
        with _Watch() as watch, suppress(TimeoutError):
            watch.add([self.exit_fd])
            async with asyncio.timeout(timeout_s):
                await watch.readable()
        return self.exit_code is not None

    async def drained(self) -> int:
        """Let it finish what it has, within its `drain_timeout_s`, and wait until it has ended; returns the exit code, as `drain`."""
        self.begin_drain()
        await self.exited(self.settings.drain_timeout_s + self.settings.shutdown_timeout_s + DRAIN_GRACE_S)
        await self.killed()
        return ExitCode.FAILED if self.exit_code is None else self.exit_code

    async def killed(self) -> None:
        """End it without a word to anybody, workers included, and wait until it has ended."""
        child = self._child
        if child is None or not child.is_ours:
            return
        self.begin_kill()
        if not await self.exited(KILL_WAIT_S):
            child.kill_group()
            await self.exited()
        self.kill()  # has nothing left to wait for: it lets go of the descriptors

    async def __aenter__(self) -> Self:
        self.start()
        try:
            await self.up()
        except BaseException:
            await asyncio.shield(self.killed())
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.drained()
        finally:  # an interrupted drain must not leave it running
            await asyncio.shield(self.killed())


class _Watch:
    """Descriptors that the running loop watches for one task. Copies are watched: a loop knows one reader a descriptor."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._copies: dict[int, int] = {}
        self._ready: set[int] = set()
        self._news = asyncio.Event()

    def add(self, fds: Iterable[int]) -> None:
        """Watch these."""
        for fd in fds:
            self._copies[fd] = os.dup(fd)
            self._loop.add_reader(self._copies[fd], self._on_readable, fd)

    def keep(self, fds: Iterable[int]) -> None:
        """Watch no others any more."""
        for fd in set(self._copies) - set(fds):
            copy = self._copies.pop(fd)
            self._loop.remove_reader(copy)
            os.close(copy)

    async def readable(self) -> set[int]:
        """Wait until some of them have something to read."""
        await self._news.wait()
        self._news.clear()
        ready, self._ready = self._ready, set()
        return ready

    def _on_readable(self, fd: int) -> None:
        self._ready.add(fd)
        self._news.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())

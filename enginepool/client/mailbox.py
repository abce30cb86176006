"""Mailboxes: how the receiving thread hands things to whoever called, be that a thread or a task of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Things for one reader, who is woken once `wanted` of them lie there, or by a `poke`.

    The reader sets `wanted`, clears its signal, looks, and only then sleeps; the writer appends and only then looks whether
    to signal. So no order of the two loses a wake-up.
    """

    def __init__(self) -> None:
        self.wanted = 1
        self._things: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._things)

    def push(self, thing: T) -> None:
        """Leave a thing (any thread)."""
        self._things.append(thing)
        if len(self._things) >= self.wanted:
            self._signal()

    def poke(self) -> None:
        """Wake the reader without leaving anything (any thread)."""
        self._signal()

    def take(self) -> list[T]:
        """Everything that lies there now (the reader)."""
        return [self._things.popleft() for _ in range(len(self._things))]

    def _signal(self) -> None:
        raise NotImplementedError


class ThreadMailbox(Mailbox[T]):
    """The reader is a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._bell = threading.Lock()  # locked while silent; an Event is Python code, which a raising signal handler leaves half done
        self._bell.acquire()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is something to do, at most that long."""
        if len(self._things) < self.wanted:
            self._bell.acquire(timeout=-1 if timeout_s is None else timeout_s)
        else:
            self._bell.acquire(blocking=False)

    def _signal(self) -> None:
        if self._bell.locked():
            with suppress(RuntimeError):  # another thread has rung it meanwhile
                self._bell.release()


class LoopMailbox(Mailbox[T]):
    """The reader is a task of the running event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.on_news: Callable[[], None] | None = None
        """Called on the loop instead of waking a task, for a reader that never waits."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_signalled = False

    async def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is something to do, at most that long."""
        if len(self._things) < self.wanted and not self._is_signalled:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
        self._is_signalled = False
        self._event.clear()

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self.on_news is None:
            self._event.set()
        else:
            self._is_signalled = False
            self.on_news()

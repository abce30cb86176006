"""Changes: whoever waits for something to change on a connection, be it a thread or a task, is told by the thread that changed it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from enginepool.client.mailbox import Mailbox


class Changes:
    """`lock` guards what is counted here and there; `tell` wakes everybody, who then look for themselves."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._watchers: list[Mailbox[Any]] = []
        self.lock = self._condition

    def wait_until(self, holds: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait on this thread until something holds; False at the timeout."""
        with self._condition:
            return self._condition.wait_for(holds, timeout_s)

    @contextmanager
    def watched_by(self, mailbox: Mailbox[Any]) -> Iterator[None]:
        """Poke this mailbox at every change."""
        self._watchers.append(mailbox)
        try:
            yield
        finally:
            self._watchers.remove(mailbox)

    def tell(self) -> None:
        """Something has changed (any thread)."""
        with self._condition:
            self._condition.notify_all()
        for mailbox in tuple(self._watchers):
            mailbox.poke()

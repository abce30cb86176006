"""Results on their way to the outputs: as they come, or held until all before them are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from enginepool.batch.target import Target


class Ready(msgspec.Struct, frozen=True):
    """One output line; failed ones go to the error file where there is one. `is_new`: it was not in the output before."""

    data: bytes
    is_failed: bool
    is_new: bool = True


class Outbox:
    """Writes output lines in batches. Ordered, it holds what came early: `held_bytes` of it. `num_written` counts new lines."""

    def __init__(self, out: Target, errors: Target | None, *, is_ordered: bool) -> None:
        self._out = out
        self._errors = errors or out
        self._is_ordered = is_ordered
        self._awaited: deque[int] = deque()
        self._early: dict[int, Ready] = {}
        self._ready: list[Ready] = []
        self.held_bytes = 0
        self.num_written = 0

    def give_up_when(self, is_over: Callable[[], bool]) -> None:
        """Ask this while an output takes nothing."""
        self._out.gives_up = self._errors.gives_up = is_over

    @property
    def span(self) -> int:
        """Lines from the first that is missing to the last that was begun."""
        return len(self._awaited)

    def expect(self, number: int) -> None:
        """A line has been begun; called in the order of the input."""
        if self._is_ordered:
            self._awaited.append(number)

    def put(self, number: int, ready: Ready) -> None:
        """A line has its result."""
        if not self._is_ordered:
            self._ready.append(ready)
            return
        self._early[number] = ready
        self.held_bytes += len(ready.data)
        while self._awaited and self._awaited[0] in self._early:
            first = self._early.pop(self._awaited.popleft())
            self.held_bytes -= len(first.data)
            self._ready.append(first)

    def flush(self) -> None:
        """Write what is ready. Raises OutputFailed."""
        ready, self._ready = self._ready, []
        if self._errors is self._out:
            self._write(self._out, ready)
        else:
            self._write(self._out, [one for one in ready if not one.is_failed])
            self._write(self._errors, [one for one in ready if one.is_failed])

    def sync(self) -> None:
        """Make durable what was written. Raises OutputFailed."""
        self._out.sync()
        self._errors.sync()

    def _write(self, target: Target, ready: list[Ready]) -> None:
        if ready:
            target.append([one.data for one in ready])
            self.num_written += sum(one.is_new for one in ready)

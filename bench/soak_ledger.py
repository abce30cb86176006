"""The soak's books: what was sent, how each item has to end, how it did, and whether an answer came twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from enginepool import Code, Output, SamplingParams
from enginepool.client.pending import Pending
from enginepool.clock import ClockAnchor
from enginepool.protocol import ResultItem


class Plan(msgspec.Struct, frozen=True):
    """One item before it is sent: how it may end, and the text that it must have when it ends well."""

    prompt: str
    params: SamplingParams
    text: str | None
    may_fail: frozenset[Code] = frozenset()
    must_fail: bool = False

    def objection(self, output: Output) -> str | None:
        """Why this end is wrong, or None."""
        if output.error is not None:
            return None if output.error.code in self.may_fail else f"{self.prompt!r} ended as {output.error}"
        if self.must_fail:
            return f"{self.prompt!r} should have failed"
        if self.text is not None and output.text != self.text:
            return f"{self.prompt!r} has the text {output.text!r}, not {self.text!r}"
        wanted = self.params.max_tokens
        return None if len(output.token_ids) == wanted else f"{self.prompt!r} has {len(output.token_ids)} tokens, not {wanted}"


class Ledger:
    """Counts of all clients of one soak; any thread may write."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_doubled = 0
        self.ended: Counter[str] = Counter()
        self.objections: list[str] = []
        self._lock = threading.Lock()

    def send(self, count: int) -> None:
        """So many items were handed to the pool."""
        with self._lock:
            self.num_sent += count

    def end(self, plan: Plan, output: Output) -> None:
        """One of them has ended."""
        objection = plan.objection(output)
        with self._lock:
            self.ended["ok" if output.error is None else output.error.code.value] += 1
            if objection is not None:
                self.objections.append(objection)

    def end_all(self, plans: Sequence[Plan], outputs: Sequence[Output]) -> None:
        """A call has returned; its outputs have to be its own, in order."""
        if [output.index for output in outputs] != list(range(len(plans))):
            self.object(f"a call with {len(plans)} items returned the indexes {[output.index for output in outputs]}")
        for plan, output in zip(plans, outputs, strict=False):
            self.end(plan, output)

    def object(self, text: str) -> None:
        """Something else is wrong."""
        with self._lock:
            self.objections.append(text)

    @property
    def num_lost(self) -> int:
        """Items that never ended."""
        return self.num_sent - self.ended.total()

    def watch_for_doubles(self) -> Callable[[], None]:
        """Look at every result that reaches this process before the client does; returns what ends that."""
        seen: dict[int, set[int]] = {}
        original = Pending.finish

        def finish(pending: Pending, items: Sequence[ResultItem], frames: Sequence[bytes], anchor: ClockAnchor) -> None:
            mine = seen.setdefault(id(pending), set())
            with self._lock:
                for item in items:
                    self.num_doubled += item.seq in mine
                    mine.add(item.seq)
            original(pending, items, frames, anchor)

        setattr(Pending, "finish", finish)  # noqa: B010 (a plain assignment is no method to the type checker)
        return lambda: setattr(Pending, "finish", original)

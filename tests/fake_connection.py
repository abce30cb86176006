"""A connection without a pool: it answers inside `submit`, or holds items until the test lets them go."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import cast

from enginepool.client.connection import Connection
from enginepool.client.ticket import Ticket
from enginepool.clock import ClockAnchor
from enginepool.errors import Code, EnginePoolError, ItemError
from enginepool.payload import CompletionOutput, GenerateResult
from enginepool.protocol import Limits, ResultItem, SubmitItem, Welcome

ANCHOR = ClockAnchor(0.0, 0.0, 0.0)
OVERLOADED = ItemError(Code.OVERLOADED, "full")
SAMPLE = CompletionOutput(0, "text", [1], "stop")


class FakeConnection:
    """Limits like a real pool's; `messages` has the indexes of every message. It refuses what a real pool would refuse."""

    def __init__(
        self,
        *,
        max_items_per_message: int = 1024,
        max_backlog_items: int = 10_000,
        submit_window: int = 4096,
        is_silent: bool = False,
    ) -> None:
        self.welcome = Welcome(1, "id", 1, "m", "ipc:///x", Limits(1 << 20, max_items_per_message), submit_window, ANCHOR)
        self.num_full = 0
        self.messages: list[list[int]] = []
        self.aborted: list[int] = []
        self.held: dict[int, Ticket] = {}
        self.is_silent = is_silent
        self.is_own_thread = False
        self.is_foreign = False
        self.fails_with: EnginePoolError | None = None
        self.fails_after = 1000
        self._max_backlog_items = max_backlog_items
        self._seqs = itertools.count()

    @property
    def real(self) -> Connection:
        """The same, for who asks for a Connection."""
        return cast(Connection, self)

    @property
    def num_pending(self) -> int:
        return len(self.held)

    @property
    def sizes(self) -> list[int]:
        """Items of each message."""
        return [len(message) for message in self.messages]

    def next_seq(self) -> int:
        return next(self._seqs)

    def call(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def give_up(self, seqs: Iterable[int]) -> None:
        self.aborted += [seq for seq in seqs if self.held.pop(seq, None) is not None]

    def submit(self, tickets: Sequence[Ticket], items: list[SubmitItem], frames: Sequence[bytes]) -> None:
        if self.fails_with is not None and len(self.messages) >= self.fails_after:
            raise self.fails_with
        assert len(self.messages) < 5000, "the call sends the same items for ever"
        assert len(tickets) == len(items) == len(frames)
        self.messages.append([ticket.index for ticket in tickets])
        for ticket in tickets:
            if len(items) > self.welcome.limits.max_items_per_message:
                self._refuse(ticket, ItemError(Code.INVALID_REQUEST, "too many in one message"))
            elif self.num_full > 0 or len(items) + len(self.held) > self._max_backlog_items:
                self._refuse(ticket, OVERLOADED)
            elif self.is_silent:
                self.held[ticket.seq] = ticket
            else:
                self._finish(ticket)
        self.num_full -= 1

    def answer(self, *indexes: int, error: ItemError | None = None) -> None:
        """End held items: those of these indexes, or all."""
        for ticket in self._take(indexes):
            if error is None:
                self._finish(ticket)
            else:
                ticket.sink.put(ticket.failed(error, ANCHOR, 0.0))

    def refuse(self, *indexes: int, error: ItemError = OVERLOADED) -> None:
        """Refuse held items: those of these indexes, or all."""
        for ticket in self._take(indexes):
            self._refuse(ticket, error)

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        sinks = {id(ticket.sink): ticket.sink for ticket in self._take(())}
        for sink in sinks.values():
            sink.lose(error)

    def _take(self, indexes: Sequence[int]) -> list[Ticket]:
        return [self.held.pop(seq) for seq, ticket in list(self.held.items()) if not indexes or ticket.index in indexes]

    def _finish(self, ticket: Ticket) -> None:
        result = GenerateResult([CompletionOutput(0, f"text of {ticket.prompt}", [1], "stop")])
        ticket.sink.put(ticket.finished(result, ResultItem(ticket.seq, 0, 1, 0.0, 0.0), ANCHOR, 0.0))

    def _refuse(self, ticket: Ticket, error: ItemError) -> None:
        ticket.sink.refuse(ticket.failed(error, ANCHOR, 0.0))

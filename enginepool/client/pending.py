"""What was sent and has not ended: every message about items goes from here to whoever waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from enginepool.client.outputs import Output
from enginepool.client.ticket import Sink, Ticket
from enginepool.clock import ClockAnchor, monotonic
from enginepool.errors import Code, EnginePoolError, ItemError
from enginepool.payload import decode_parts, decode_result
from enginepool.protocol import NO_STAMPS, ResultItem


class Pending:
    """The tickets by number. Callers add and forget, the receiving thread ends; a ticket that is gone ends in nothing."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, tickets: Iterable[Ticket]) -> None:
        """These are about to be sent."""
        for ticket in tickets:
            self._tickets[ticket.seq] = ticket

    def forget(self, seqs: Iterable[int]) -> list[int]:
        """Nobody waits for these any more; returns those that had not ended."""
        return [seq for seq in seqs if self._tickets.pop(seq, None) is not None]

    def of_sink(self, sink: Sink) -> list[int]:
        """The numbers of all whose results would go to this sink."""
        return [seq for seq, ticket in list(self._tickets.items()) if ticket.sink is sink]

    def finish(self, items: Sequence[ResultItem], frames: Sequence[bytes], anchor: ClockAnchor) -> None:
        """These have ended."""
        now = monotonic()
        for item, frame in zip(items, frames, strict=True):
            ticket = self._tickets.pop(item.seq, None)
            if ticket is not None:
                ticket.sink.put(_output(ticket, item, frame, anchor, now))

    def add_deltas(self, seqs: Sequence[int], frames: Sequence[bytes], anchor: ClockAnchor) -> list[int]:
        """Something is new in these streams; returns those that had to be given up, because it can't be read."""
        given_up = []
        for seq, frame in zip(seqs, frames, strict=True):
            ticket = self._tickets.get(seq)
            if ticket is None or ticket.stream is None:
                continue
            try:
                parts = decode_parts(frame)
            except Exception as error:
                given_up += self.forget([seq])
                ticket.sink.put(ticket.failed(_unreadable("delta", error), anchor, monotonic()))
            else:
                ticket.stream.add(parts)
        return given_up

    def refuse(self, seqs: Iterable[int], error: ItemError, anchor: ClockAnchor) -> None:
        """These were not accepted."""
        now = monotonic()
        for seq in seqs:
            ticket = self._tickets.pop(seq, None)
            if ticket is not None:
                ticket.sink.refuse(ticket.failed(error, anchor, now))

    def lose(self, error: EnginePoolError) -> None:
        """None of them will end."""
        sinks = {id(ticket.sink): ticket.sink for ticket in list(self._tickets.values())}
        self._tickets.clear()
        for sink in sinks.values():
            sink.lose(error)


def _output(ticket: Ticket, item: ResultItem, frame: bytes, anchor: ClockAnchor, now: float) -> Output:
    """What can't be read is this item's error; the next one is fine."""
    try:
        if item.error is not None:
            return ticket.failed(item.error, anchor, now, item)
        return ticket.finished(decode_result(frame), item, anchor, now)
    except Exception as error:
        plain = msgspec.structs.replace(item, stamps=NO_STAMPS)
        return ticket.failed(_unreadable("result", error), anchor, now, plain)


def _unreadable(what: str, error: Exception) -> ItemError:
    text = f"this item's {what} could not be read: {type(error).__name__}: {error}; are client and workers of the same version?"
    return ItemError(Code.UNREADABLE_RESULT, text)

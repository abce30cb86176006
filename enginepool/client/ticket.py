"""A ticket: what the client remembers of an item until its one result comes, and how the result becomes an Output."""

from __future__ import annotations

from typing import Protocol

from enginepool.client.outputs import Output
from enginepool.clock import ClockAnchor, EngineStamps, Timings, decode_stamps
from enginepool.errors import EnginePoolError, ItemError
from enginepool.payload import CompletionOutput, GenerateResult
from enginepool.protocol import ResultItem


class Sink(Protocol):
    """Who waits for results; called on the I/O thread."""

    def put(self, output: Output) -> None:
        """One item has ended."""

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone; nothing more will come."""

    def refuse(self, output: Output) -> None:
        """The pool did not accept the item."""


class StreamSink(Sink, Protocol):
    """Who waits for a stream."""

    def add(self, parts: list[CompletionOutput]) -> None:
        """There is something new."""


class Ticket:
    """One item in flight. `submitted` is monotonic."""

    __slots__ = ("index", "prompt", "prompt_token_ids", "request_id", "seq", "sink", "stream", "submitted")

    def __init__(
        self,
        seq: int,
        index: int,
        request_id: str,
        prompt: str | None,
        ids: list[int] | None,
        submitted: float,
        sink: Sink,
        stream: StreamSink | None = None,
    ) -> None:
        self.seq = seq
        self.index = index
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = ids
        self.submitted = submitted
        self.sink = sink
        self.stream = stream

    def failed(self, error: ItemError, anchor: ClockAnchor, now: float, item: ResultItem | None = None) -> Output:
        """The Output of an item without a result."""
        return Output(
            index=self.index,
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[],
            timings=self._timings(item, anchor, now),
            error=error,
            worker=item.worker if item else None,
            attempts=item.attempts if item else 0,
        )

    def finished(self, result: GenerateResult, item: ResultItem, anchor: ClockAnchor, now: float) -> Output:
        """The Output of an item with a result."""
        return Output(
            index=self.index,
            request_id=self.request_id,
            prompt=self.prompt if result.prompt is None else result.prompt,
            prompt_token_ids=self.prompt_token_ids or result.prompt_token_ids,
            outputs=result.outputs,
            timings=self._timings(item, anchor, now),
            worker=item.worker,
            attempts=item.attempts,
            prompt_logprobs=result.prompt_logprobs,
            num_cached_tokens=result.num_cached_tokens,
            answer=result.answer,
        )

    def _timings(self, item: ResultItem | None, anchor: ClockAnchor, now: float) -> Timings:
        wall = anchor.to_wall
        submitted, delivered = anchor.own_to_wall(self.submitted), anchor.own_to_wall(now)
        if item is None:
            return Timings(submitted=submitted, delivered=delivered)
        stamps = decode_stamps(item.stamps) or NO_STAMPS
        received, finished = wall(item.received), wall(stamps.finished)
        # The clock of another machine is known to half a round trip only, but what came first is known for sure.
        return Timings(
            min(submitted, received or submitted),
            received,
            wall(item.leased),
            wall(stamps.arrived),
            wall(stamps.queued),
            wall(stamps.scheduled),
            wall(stamps.first_token),
            wall(stamps.last_token),
            finished,
            max(delivered, finished or delivered),
            stamps.num_tokens,
        )


NO_STAMPS = EngineStamps()

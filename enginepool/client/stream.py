"""One streamed item: its deltas as they come, its whole text at the end, and an abort for whoever leaves early."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from types import TracebackType
from typing import Any

import msgspec

from enginepool.client.connection import Connection
from enginepool.client.futures import SingleSink
from enginepool.client.mailbox import LoopMailbox, Mailbox, ThreadMailbox
from enginepool.client.outputs import Output
from enginepool.client.ticket import Ticket
from enginepool.clock import monotonic
from enginepool.errors import Code, EnginePoolError, ForkedPool, InvalidRequest, ItemError
from enginepool.payload import CompletionOutput, Logprobs

TIMEOUT = ItemError(Code.TIMEOUT, "the stream's timeout_s passed before it finished")


class Delta(msgspec.Struct, frozen=True):
    """What is new in one sample of a stream. The last delta carries the whole `output`, whether it is `ok` or has an error.

    `token_ids` and `logprobs` are those of `text`; a token that is half a character has an empty `text` until the next.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    output: Output | None = None


class Transcript:
    """Puts the samples of a stream together from their parts."""

    def __init__(self) -> None:
        self._samples: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, parts: list[CompletionOutput]) -> list[Delta]:
        """Take parts; returns the same as deltas."""
        for part in parts:
            self._add(part)
        return [Delta(part.index, part.text, part.token_ids, part.logprobs, part.finish_reason, part.stop_reason) for part in parts]

    def samples(self) -> list[CompletionOutput]:
        """What has come so far, by sample."""
        for index, sample in self._samples.items():
            sample.text = "".join(self._texts[index])
        return [self._samples[index] for index in sorted(self._samples)]

    def _add(self, part: CompletionOutput) -> None:
        sample = self._samples.get(part.index)
        if sample is None:
            sample = self._samples[part.index] = CompletionOutput(part.index, "", [])
            self._texts[part.index] = []
        self._texts[part.index].append(part.text)
        sample.token_ids += part.token_ids
        sample.finish_reason, sample.stop_reason = part.finish_reason, part.stop_reason
        if part.cumulative_logprob is not None:
            sample.cumulative_logprob = part.cumulative_logprob
        if part.logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + part.logprobs


class StreamEnd(SingleSink):
    """The sink of a stream: told by the receiving thread and, at a time limit, by the reader's own; whoever ends it first has."""

    def __init__(self, mailbox: Mailbox[Delta]) -> None:
        self.mailbox = mailbox
        self.error: EnginePoolError | None = None
        self._transcript = Transcript()
        self._lock = threading.Lock()
        self._is_ended = False

    def add(self, parts: list[CompletionOutput]) -> None:
        """There is something new."""
        with self._lock:
            if not self._is_ended:
                self._push(self._transcript.add(parts))

    def put(self, output: Output) -> None:
        """The item has ended: its last delta carries everything."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            *deltas, last = self._transcript.add(output.outputs) or [Delta()]
            output.outputs = self._transcript.samples()
            self._push([*deltas, msgspec.structs.replace(last, output=output)])

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self.error = error
        self.mailbox.poke()

    def _push(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.mailbox.push(delta)


class _Base:
    """What both streams share: the deltas that wait, the end, and giving up."""

    def __init__(self, connection: Connection, ticket: Ticket, end: StreamEnd, timeout_s: float | None) -> None:
        self.output: Output | None = None
        self._connection = connection
        self._ticket = ticket
        self._end = end
        self._ends_at = None if timeout_s is None else monotonic() + timeout_s
        self._ready: list[Delta] = []
        self._is_over = False

    def close(self) -> None:
        """Stop reading; what is not finished is aborted within a step. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self._connection.give_up([self._ticket.seq])

    def __del__(self) -> None:
        self.close()

    def _next(self) -> Delta | None:
        """The next delta, or None when one has to wait. Raises StopIteration at the end, PoolLost and its kin."""
        if self._is_over:
            raise StopIteration
        if self._connection.is_foreign:
            raise ForkedPool("this stream belongs to the parent process")
        error = self._end.error  # looked at first, so that nothing can have come between the last delta and this
        if not self._ready:
            self._ready = self._end.mailbox.take()[::-1]
        if not self._ready:
            if error is not None:
                self._is_over = True
                raise error
            if self._left_s() == 0.0:
                self._time_out()
            return None
        delta = self._ready.pop()
        if delta.output is not None:
            self.output, self._is_over = delta.output, True
        return delta

    def _left_s(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - monotonic())

    def _time_out(self) -> None:
        self._connection.give_up([self._ticket.seq])
        self._end.put(self._ticket.failed(TIMEOUT, self._connection.welcome.anchor, monotonic()))


class Stream(_Base, Iterator[Delta]):
    """Iterate over it for Deltas; afterwards `output` is the whole Output (None until then).

    Leaving a `for` loop over it early aborts the item, as do `close()` and the end of a `with` block.
    """

    def __iter__(self) -> Iterator[Delta]:
        return _Reading(self)

    def __next__(self) -> Delta:
        mailbox = self._end.mailbox
        assert isinstance(mailbox, ThreadMailbox)
        if self._connection.is_own_thread:
            raise InvalidRequest("a future's callback must not wait for a stream: it runs on the thread that receives")
        try:
            while (delta := self._next()) is None:
                mailbox.wait(self._left_s())
        except BaseException:
            self.close()
            raise
        return delta

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncStream(_Base, AsyncIterator[Delta]):
    """The same for `async for`; `aclose()` or the end of an `async with` block aborts what is not finished."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _AsyncReading(self)

    async def __anext__(self) -> Delta:
        mailbox = self._end.mailbox
        assert isinstance(mailbox, LoopMailbox)
        try:
            while (delta := self._next()) is None:
                await mailbox.wait(self._left_s())
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise
        return delta

    async def aclose(self) -> None:
        """Stop reading; what is not finished is aborted within a step."""
        self.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()


class _Reading(Iterator[Delta]):
    """One `for` loop over a stream: leaving it early ends the stream, whoever else holds it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __next__(self) -> Delta:
        return next(self._stream)

    def __del__(self) -> None:
        self._stream.close()


class _AsyncReading(AsyncIterator[Delta]):
    """The same for one `async for`."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __anext__(self) -> Awaitable[Delta]:
        return self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.close()

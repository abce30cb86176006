"""Endless inputs: pulls from the caller's iterable no faster than its loop takes results, and keeps order when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any

from enginepool.client.flight import Flight, Job
from enginepool.client.mailbox import LoopMailbox, ThreadMailbox
from enginepool.client.outputs import Output
from enginepool.client.progress import View
from enginepool.client.requests import encode_sampling
from enginepool.clock import monotonic
from enginepool.errors import Code, InvalidRequest, ItemError

Pair = tuple[int, Output]
LINGER_S = 0.005
DEFAULT_WINDOW = 1024


class JobMaker:
    """Makes jobs of what the iterable yields; `params` may be a callable of (index, value)."""

    def __init__(self, params: Any, priority: int, deadline_s: float | None) -> None:
        self._make = params if callable(params) else None
        self._fixed = None if callable(params) else encode_sampling(params)
        self._priority = priority
        self._deadline_s = deadline_s

    def __call__(self, index: int, value: Any) -> Job:
        """One job. What the caller's own callable raises is passed on; params at fault are the item's error."""
        if self._fixed is not None or self._make is None:
            return Job(index, value, self._fixed or encode_sampling(None), None, self._priority, self._deadline_s)
        made = self._make(index, value)
        try:
            params = encode_sampling(made)
        except InvalidRequest as error:
            return Job(index, value, ItemError(Code.INVALID_REQUEST, str(error)), None, self._priority, self._deadline_s)
        return Job(index, value, params, None, self._priority, self._deadline_s)


class Window:
    """What is between the iterable and the caller's loop: never more than `size` items, those put in order included."""

    def __init__(self, flight: Flight, make_job: Callable[[int, Any], Job], size: int, view: View, *, in_order: bool) -> None:
        self._flight = flight
        self._make_job = make_job
        self._size = size
        self._view = view
        self._in_order = in_order
        self._pending: list[Job] = []
        self._flushed_at = 0.0
        self._early: dict[int, Output] = {}
        self.num_pulled = 0
        self.num_taken = 0
        self._num_failed = 0
        self._num_tokens = 0

    @property
    def can_pull(self) -> bool:
        """Whether one more item may be asked for."""
        return self.num_pulled - self.num_taken < self._size and self._flight.room > len(self._pending)

    @property
    def is_empty(self) -> bool:
        """Whether everything that was pulled has been taken."""
        return self.num_pulled == self.num_taken

    def make_job(self, value: Any) -> Job:
        """The job of what the iterable gave. Raises what the caller's `params` raises."""
        return self._make_job(self.num_pulled, value)

    def add(self, job: Job) -> None:
        """Take it in; sent in chunks, or at once when the iterable is slow: the next pull may take for ever."""
        self.num_pulled += 1
        self._pending.append(job)
        if len(self._pending) >= self._flight.chunk or monotonic() - self._flushed_at > LINGER_S:
            self.flush()

    def flush(self) -> None:
        """Send what was pulled."""
        pending, self._pending = self._pending, []
        if pending:
            self._flight.start(pending)
            self._flushed_at = monotonic()

    def ready(self) -> list[Pair]:
        """What the caller's loop gets next. Raises PoolLost when nothing more will come."""
        is_lost = self._flight.is_lost  # looked at first, so that nothing can have come between the last output and this
        outputs = self._flight.advance()
        if is_lost and not outputs:
            self._flight.check()
        for output in outputs:
            self._num_failed += output.error is not None
            self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        if not self._in_order:
            return [(output.index, output) for output in outputs]
        self._early.update({output.index: output for output in outputs})
        pairs: list[Pair] = []
        while (index := self.num_taken + len(pairs)) in self._early:
            pairs.append((index, self._early.pop(index)))
        return pairs

    def took(self) -> None:
        """The caller's loop has taken one."""
        self.num_taken += 1
        self._view.update(self.num_taken, self._num_failed, self._num_tokens)

    @property
    def sleep_s(self) -> float:
        """How long to sleep at most when there is nothing to do."""
        return self._flight.retry_s

    def abort(self) -> None:
        """Nobody wants the rest."""
        self._flight.abort()


class Source:
    """The caller's iterable, until it ends or fails; a failure is raised after what was pulled has been handed out."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.is_over = False
        self.failure: Exception | None = None

    def pull_into(self, window: Window) -> None:
        """Pull one item."""
        try:
            value = next(self._items)
        except StopIteration:
            self.is_over = True
        except Exception as failure:
            self.is_over, self.failure = True, failure
        else:
            self.give(value, window)

    def give(self, value: Any, window: Window) -> None:
        """Make a job of what was pulled."""
        try:
            job = window.make_job(value)
        except Exception as failure:
            self.is_over, self.failure = True, failure
        else:
            window.add(job)


class AsyncSource(Source):
    """The same of an async iterable, pulled beside the loop that hands out results.

    One task does all the pulling, because a generator may hold what belongs to its task: a timeout, a context variable.
    """

    def __init__(self, items: AsyncIterator[Any]) -> None:
        super().__init__(iter(()))
        self._async_items = items
        self._is_wanted = asyncio.Event()
        self._pulled: list[Any] = []
        self._task: asyncio.Task[None] | None = None

    def try_pull(self, window: Window, mailbox: LoopMailbox[Output]) -> bool:
        """Take what has been pulled, or ask for it; False when one has to wait for it."""
        if self._task is None:
            self._task = asyncio.create_task(self._pull_all(mailbox))
            self._task.add_done_callback(lambda _: mailbox.poke())
        if self._pulled:
            self.give(self._pulled.pop(), window)
        elif self._task.done():
            self._end(self._task)
        else:
            self._is_wanted.set()
            return False
        return True

    async def _pull_all(self, mailbox: LoopMailbox[Output]) -> None:
        """Pull one item each time one is wanted."""
        while True:
            await self._is_wanted.wait()
            try:
                value = await anext(self._async_items)
            except StopAsyncIteration:
                return
            self._is_wanted.clear()  # only now: it may have been asked for again meanwhile
            self._pulled.append(value)
            mailbox.poke()

    def _end(self, task: asyncio.Task[None]) -> None:
        self.is_over = True
        try:
            task.result()
        except Exception as failure:
            self.failure = failure

    async def close(self) -> None:
        """Stop pulling, and let the iterable end what it was waiting for."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # nobody wants to know any more


def iterate(window: Window, source: Source, mailbox: ThreadMailbox[Output]) -> Generator[Pair, None, None]:
    """The loop of `iter_many`, on the caller's thread."""
    try:
        while not (source.is_over and window.is_empty):
            pairs = window.ready()
            if pairs:
                window.flush()
            for pair in pairs:
                window.took()
                yield pair
            if source.is_over or not window.can_pull:
                window.flush()
                if not pairs:
                    mailbox.wait(window.sleep_s)
            else:
                source.pull_into(window)
        if source.failure is not None:
            raise source.failure
    finally:
        window.abort()


async def iterate_async(window: Window, source: Source, mailbox: LoopMailbox[Output]) -> AsyncGenerator[Pair, None]:
    """The loop of `AsyncPool.iter_many`."""
    try:
        while not (source.is_over and window.is_empty):
            pairs = window.ready()
            if pairs:
                window.flush()
            for pair in pairs:
                window.took()
                yield pair
            if not source.is_over and window.can_pull and _pull(source, window, mailbox):
                continue
            window.flush()
            if not pairs:
                await mailbox.wait(window.sleep_s)
        if source.failure is not None:
            raise source.failure
    finally:
        window.abort()
        if isinstance(source, AsyncSource):
            await source.close()


def _pull(source: Source, window: Window, mailbox: LoopMailbox[Output]) -> bool:
    if isinstance(source, AsyncSource):
        return source.try_pull(window, mailbox)
    source.pull_into(window)
    return True

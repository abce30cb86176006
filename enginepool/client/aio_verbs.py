"""The verbs of an AsyncPool: those of Pool, for tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Unpack

from enginepool.client.calls import Single, count_of, make_jobs, make_window, timed_out
from enginepool.client.connection import STATUS_TIMEOUT_S, Connection
from enginepool.client.conversations import ChatEncoder, ChatKeywords, Conversation, list_conversations
from enginepool.client.flight import Flight
from enginepool.client.futures import refusal_of
from enginepool.client.iterate import AsyncSource, Pair, Source, iterate_async
from enginepool.client.mailbox import LoopMailbox
from enginepool.client.many import TICK_S, ManyCall, OnError, check_on_error, raise_first, warn_of
from enginepool.client.outputs import Output
from enginepool.client.progress import ProgressCallback, make_view
from enginepool.client.requests import Encode, Params, Prompt, check_iterable, check_seconds, encode_prompt, list_prompts
from enginepool.client.stream import AsyncStream, Delta, StreamEnd
from enginepool.client.verbs import EachParams
from enginepool.errors import EnginePoolError
from enginepool.status import PoolStatus


class LoopPost:
    """Runs what the receiving thread leaves here on the event loop, many at one wake-up."""

    def __init__(self) -> None:
        self._mailbox = LoopMailbox[tuple[asyncio.Future[Output], Output | None, EnginePoolError | None]]()
        self._mailbox.on_news = self._settle

    def leave(self, future: asyncio.Future[Output], output: Output | None, error: EnginePoolError | None) -> None:
        """Settle this future on its loop (any thread)."""
        self._mailbox.push((future, output, error))

    def _settle(self) -> None:
        for future, output, error in self._mailbox.take():
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            elif output is not None:
                future.set_result(output)


class FutureEnd:
    """The sink of an asyncio future."""

    def __init__(self, future: asyncio.Future[Output], post: LoopPost) -> None:
        self._future = future
        self._post = post

    def put(self, output: Output) -> None:
        """The item has ended."""
        self._post.leave(self._future, output, None)

    def refuse(self, output: Output) -> None:
        """The pool did not accept the item."""
        error = refusal_of(output)
        self._post.leave(self._future, None if error else output, error)

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self._post.leave(self._future, None, error)


class AsyncVerbs:
    """What an AsyncPool can be asked; arguments, results and errors are those of `Pool` (enginepool/client/verbs.py).

    Cancelling a task, or leaving an `async for`, aborts what it waits for. No verb blocks the loop or a thread.
    """

    def _usable(self) -> Connection:
        raise NotImplementedError

    @property
    def _post(self) -> LoopPost:
        raise NotImplementedError

    async def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Output:
        """Run one prompt and return its Output; raises Overloaded and Draining where the pool does not take it."""
        return await self._one(Single(encode_prompt, prompt, params, request_id, priority, deadline_s), timeout_s)

    async def chat(
        self,
        messages: Conversation,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        **chat: Unpack[ChatKeywords],
    ) -> Output:
        """Run one conversation."""
        return await self._one(Single(ChatEncoder(chat), messages, params, request_id, priority, deadline_s), timeout_s)

    async def generate_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        priorities: int | Sequence[int] = 0,
        deadline_s: float | Sequence[float | None] | None = None,
        on_error: OnError = "return",
        progress: bool | ProgressCallback = False,
        timeout_s: float | None = None,
    ) -> list[Output]:
        """Run many prompts; returns one Output a prompt, in input order, always."""
        items = list_prompts(prompts)
        return await self._many(encode_prompt, items, params, request_ids, priorities, deadline_s, on_error, progress, timeout_s)

    async def chat_many(
        self,
        conversations: Iterable[Conversation],
        params: Params | Sequence[Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        priorities: int | Sequence[int] = 0,
        deadline_s: float | Sequence[float | None] | None = None,
        on_error: OnError = "return",
        progress: bool | ProgressCallback = False,
        timeout_s: float | None = None,
        **chat: Unpack[ChatKeywords],
    ) -> list[Output]:
        """Run many conversations."""
        items = list_conversations(conversations)
        return await self._many(ChatEncoder(chat), items, params, request_ids, priorities, deadline_s, on_error, progress, timeout_s)

    def iter_many(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: EachParams = None,
        *,
        in_order: bool = False,
        window: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        progress: bool | ProgressCallback = False,
    ) -> AsyncGenerator[Pair, None]:
        """Yield (index, Output) as items finish, or in input order, for an iterable or async iterable of any length.

        While an async iterable makes you wait, results go on coming; a plain one is pulled on the loop, so it must not block.
        """
        return self._iterate(encode_prompt, prompts, params, in_order, window, priority, deadline_s, progress)

    def iter_chat_many(
        self,
        conversations: Iterable[Conversation] | AsyncIterable[Conversation],
        params: EachParams = None,
        *,
        in_order: bool = False,
        window: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        progress: bool | ProgressCallback = False,
        **chat: Unpack[ChatKeywords],
    ) -> AsyncGenerator[Pair, None]:
        """Yield (index, Output) of conversations, as `iter_many` does of prompts."""
        return self._iterate(ChatEncoder(chat), conversations, params, in_order, window, priority, deadline_s, progress)

    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Run one prompt and yield Deltas as tokens come; the last one carries the whole Output."""
        encode = partial(encode_prompt, is_stream=True)
        return self._stream(Single(encode, prompt, params, request_id, priority, deadline_s), timeout_s)

    def stream_chat(
        self,
        messages: Conversation,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        **chat: Unpack[ChatKeywords],
    ) -> AsyncStream:
        """Run one conversation and yield Deltas, as `stream` does."""
        encode = partial(ChatEncoder(chat), is_stream=True)
        return self._stream(Single(encode, messages, params, request_id, priority, deadline_s), timeout_s)

    def submit(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> asyncio.Future[Output]:
        """Start one prompt and return a future at once; cancelling it aborts the item."""
        return self._submit(Single(encode_prompt, prompt, params, request_id, priority, deadline_s))

    def submit_chat(
        self,
        messages: Conversation,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        **chat: Unpack[ChatKeywords],
    ) -> asyncio.Future[Output]:
        """Start one conversation and return a future at once, as `submit` does."""
        return self._submit(Single(ChatEncoder(chat), messages, params, request_id, priority, deadline_s))

    async def status(self) -> PoolStatus:
        """What the pool and each of its workers are doing."""
        connection = self._usable()
        with connection.asked() as question:
            await until(connection, lambda: question.is_over, STATUS_TIMEOUT_S)
            return question.answer()

    async def _one(self, single: Single, timeout_s: float | None) -> Output:
        check_seconds("timeout_s", timeout_s)
        connection, future = self._usable(), asyncio.get_running_loop().create_future()
        ticket = single.send(connection, FutureEnd(future, self._post))
        try:
            async with asyncio.timeout(timeout_s) as limit:
                output: Output = await future
                return output
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return timed_out(connection, ticket)
            connection.give_up([ticket.seq])
            raise

    async def _many(
        self,
        encode: Encode,
        values: list[Any],
        params: Any,
        request_ids: Any,
        priorities: Any,
        deadline_s: Any,
        on_error: OnError,
        progress: bool | ProgressCallback,
        timeout_s: float | None,
    ) -> list[Output]:
        connection, mailbox = self._usable(), LoopMailbox[Output]()
        check_on_error(on_error)
        timeout_s = check_seconds("timeout_s", timeout_s)
        jobs = make_jobs(values, params, request_ids, priorities, deadline_s)
        with connection.call(), make_view(len(jobs), progress) as view:
            steps = ManyCall(Flight(connection, encode, mailbox), jobs, timeout_s, view, TICK_S if view.is_live else None).steps()
            outputs = await _drive(steps, mailbox)
        if on_error == "raise":
            raise_first(outputs)
        warn_of(outputs, jobs, stacklevel=4)
        return outputs

    def _iterate(
        self,
        encode: Encode,
        items: Any,
        params: Any,
        in_order: bool,
        window: int | None,
        priority: int,
        deadline_s: float | None,
        progress: bool | ProgressCallback,
    ) -> AsyncGenerator[Pair, None]:
        connection, mailbox = self._usable(), LoopMailbox[Output]()
        is_async = hasattr(items, "__aiter__")
        if not is_async:
            check_iterable(items)
        view = make_view(count_of(items), progress)
        state = make_window(
            connection, encode, mailbox, view, params, priority=priority, deadline_s=deadline_s, window=window, in_order=in_order
        )

        async def run() -> AsyncGenerator[Pair, None]:
            source = AsyncSource(aiter(items)) if is_async else Source(iter(items))
            with view:
                async with aclosing(iterate_async(state, source, mailbox)) as pairs:
                    async for pair in pairs:
                        yield pair

        return run()

    def _stream(self, single: Single, timeout_s: float | None) -> AsyncStream:
        check_seconds("timeout_s", timeout_s)
        connection, end = self._usable(), StreamEnd(LoopMailbox[Delta]())
        return AsyncStream(connection, single.send(connection, end, end), end, timeout_s)

    def _submit(self, single: Single) -> asyncio.Future[Output]:
        connection, future = self._usable(), asyncio.get_running_loop().create_future()
        ticket = single.send(connection, FutureEnd(future, self._post))
        future.add_done_callback(lambda done: connection.give_up([ticket.seq]) if done.cancelled() else None)
        return future


async def until(connection: Connection, condition: Any, timeout_s: float | None) -> bool:
    """Wait until a condition on a connection holds; False at the timeout."""
    mailbox, loop = LoopMailbox[None](), asyncio.get_running_loop()
    ends_at = None if timeout_s is None else loop.time() + timeout_s
    with connection.changes.watched_by(mailbox):
        while not condition():
            left_s = None if ends_at is None else ends_at - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            await mailbox.wait(left_s)
    return True


async def _drive(steps: Any, mailbox: LoopMailbox[Output]) -> list[Output]:
    """Sleep as a call's steps say, to its end."""
    try:
        while True:
            mailbox.wanted, sleep_s = next(steps)
            await mailbox.wait(sleep_s)
    except StopIteration as end:
        outputs: list[Output] = end.value
        return outputs
    finally:
        steps.close()

"""The verbs of a Pool: one, many or endless items, whole or streamed, prompts or conversations; all for the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, Unpack

from enginepool.client.calls import Single, count_of, make_jobs, make_window, timed_out
from enginepool.client.connection import Connection
from enginepool.client.conversations import ChatEncoder, ChatKeywords, Conversation, list_conversations
from enginepool.client.flight import Flight
from enginepool.client.futures import OutputFuture, Waiter
from enginepool.client.iterate import Pair, Source, iterate
from enginepool.client.mailbox import ThreadMailbox
from enginepool.client.many import TICK_S, ManyCall, OnError, check_on_error, raise_first, warn_of
from enginepool.client.outputs import Output
from enginepool.client.progress import ProgressCallback, make_view
from enginepool.client.requests import Encode, Params, Prompt, check_iterable, check_seconds, encode_prompt, list_prompts
from enginepool.client.stream import Delta, Stream, StreamEnd
from enginepool.status import PoolStatus

EachParams: TypeAlias = "Params | Callable[[int, Any], Params]"


class Verbs:
    """What a Pool can be asked. A subclass says over which connection.

    Every verb takes `params` (SamplingParams, a dict, a vllm.SamplingParams; None: the model's own generation config). Items
    of lower `priority` go first; `deadline_s` counts from the item's submission. The `chat` verbs take `LLM.chat`'s keywords
    and `request_format`. All raise PoolLost when the pool is gone, PoolClosed after `close`, and InvalidRequest for a call
    that makes no sense; what is wrong with one item is the `error` of its Output.
    """

    def _usable(self, *, waits: bool = True) -> Connection:
        raise NotImplementedError

    def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Output:
        """Run one prompt and return its Output (look at `ok`); at `timeout_s` with the error `timeout`.

        Raises Overloaded and Draining where the pool does not take it.
        """
        return self._one(Single(encode_prompt, prompt, params, request_id, priority, deadline_s), timeout_s)

    def chat(
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
        """Run one conversation, as `generate` runs a prompt; `Output.prompt` is the text that the worker rendered."""
        return self._one(Single(ChatEncoder(chat), messages, params, request_id, priority, deadline_s), timeout_s)

    def generate_many(
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
        """Run many prompts; returns one Output a prompt, in input order, always.

        `params`, `priorities` and `deadline_s` are one for all or one an item. With `on_error="raise"` the first failed item
        raises ItemFailed after all have ended. At `timeout_s` the unfinished items end with the code `timeout`. `progress`
        shows a bar, or is called with a Progress about ten times a second and once at the end; what it raises ends the call.
        PoolLost has the finished outputs.
        """
        return self._many(encode_prompt, list_prompts(prompts), params, request_ids, priorities, deadline_s, on_error, progress, timeout_s)

    def chat_many(
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
        """Run many conversations, as `generate_many` runs prompts."""
        items = list_conversations(conversations)
        return self._many(ChatEncoder(chat), items, params, request_ids, priorities, deadline_s, on_error, progress, timeout_s)

    def iter_many(
        self,
        prompts: Iterable[Prompt],
        params: EachParams = None,
        *,
        in_order: bool = False,
        window: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Iterator[Pair]:
        """Yield (index, Output) as items finish, or in input order, for an iterable of any length.

        Pulls a prompt only while fewer than `window` (1024, at most the pool's submit_window) lie between the iterable and
        your loop, results that wait for their turn included. `params` may be a callable of (index, prompt). What the iterable
        or the callable raises is raised here, after everything pulled before has been yielded. Leaving the loop aborts the rest.
        """
        return self._iterate(encode_prompt, prompts, params, in_order, window, priority, deadline_s, progress)

    def iter_chat_many(
        self,
        conversations: Iterable[Conversation],
        params: EachParams = None,
        *,
        in_order: bool = False,
        window: int | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        progress: bool | ProgressCallback = False,
        **chat: Unpack[ChatKeywords],
    ) -> Iterator[Pair]:
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
    ) -> Stream:
        """Run one prompt and yield Deltas as tokens come; the last one carries the whole Output.

        A worker that dies before the first delta is not noticed; after it the Output's error is `worker_lost`, with the text
        so far. The first `next` raises Overloaded and Draining where the pool does not take it.
        """
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
    ) -> Stream:
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
    ) -> OutputFuture:
        """Start one prompt and return at once. `cancel()` on the future aborts it; a full backlog raises Overloaded from it."""
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
    ) -> OutputFuture:
        """Start one conversation and return at once, as `submit` does."""
        return self._submit(Single(ChatEncoder(chat), messages, params, request_id, priority, deadline_s))

    def status(self) -> PoolStatus:
        """What the pool and each of its workers are doing."""
        return self._usable().status()

    def _one(self, single: Single, timeout_s: float | None) -> Output:
        check_seconds("timeout_s", timeout_s)
        connection, waiter = self._usable(), Waiter()
        try:
            ticket = single.send(connection, waiter)
            return waiter.wait(timeout_s) or timed_out(connection, ticket)
        except BaseException:
            connection.give_up_of(waiter)
            raise

    def _many(
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
        connection, mailbox = self._usable(), ThreadMailbox[Output]()
        check_on_error(on_error)
        timeout_s = check_seconds("timeout_s", timeout_s)
        jobs = make_jobs(values, params, request_ids, priorities, deadline_s)
        with connection.call(), make_view(len(jobs), progress) as view:
            steps = ManyCall(Flight(connection, encode, mailbox), jobs, timeout_s, view, TICK_S if view.is_live else None).steps()
            outputs = _drive(steps, mailbox)
        if on_error == "raise":
            raise_first(outputs)
        warn_of(outputs, jobs, stacklevel=4)
        return outputs

    def _iterate(
        self,
        encode: Encode,
        items: Iterable[Any],
        params: Any,
        in_order: bool,
        window: int | None,
        priority: int,
        deadline_s: float | None,
        progress: bool | ProgressCallback,
    ) -> Iterator[Pair]:
        connection, mailbox = self._usable(), ThreadMailbox[Output]()
        check_iterable(items)
        view = make_view(count_of(items), progress)
        state = make_window(
            connection, encode, mailbox, view, params, priority=priority, deadline_s=deadline_s, window=window, in_order=in_order
        )

        def run() -> Iterator[Pair]:
            with view:
                yield from iterate(state, Source(iter(items)), mailbox)

        return run()

    def _stream(self, single: Single, timeout_s: float | None) -> Stream:
        check_seconds("timeout_s", timeout_s)
        connection, end = self._usable(waits=False), StreamEnd(ThreadMailbox[Delta]())
        try:
            return Stream(connection, single.send(connection, end, end), end, timeout_s)
        except BaseException:
            connection.give_up_of(end)
            raise

    def _submit(self, single: Single) -> OutputFuture:
        connection, future = self._usable(waits=False), OutputFuture()
        try:
            ticket = single.send(connection, future)
        except BaseException:
            connection.give_up_of(future)
            raise
        future.on_cancel = lambda: connection.give_up([ticket.seq])
        return future


def _drive(steps: Any, mailbox: ThreadMailbox[Output]) -> list[Output]:
    """Sleep as a call's steps say, to its end."""
    try:
        while True:
            mailbox.wanted, sleep_s = next(steps)
            mailbox.wait(sleep_s)
    except StopIteration as end:
        outputs: list[Output] = end.value
        return outputs
    finally:
        steps.close()

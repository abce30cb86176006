"""One `*_many` call: submits within the window, waits, shows progress, and always ends with one Output an input."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from enginepool.client.connection import TIMEOUT, Connection
from enginepool.client.futures import Collector
from enginepool.client.outputs import Output
from enginepool.client.progress import ProgressCallback, make_view
from enginepool.client.requests import EncodedParams, check_deadline, check_priority, encode_item, text_of
from enginepool.client.ticket import Ticket
from enginepool.clock import monotonic
from enginepool.errors import Code, InvalidRequest, ItemError, ItemFailed, PoolLost
from enginepool.protocol import SubmitItem

CHUNK = 64
TICK_S = 0.1
RETRY_S = 0.05
LONGEST_WAIT_S = 1.0


class EnginePoolWarning(UserWarning):
    """Something about a finished call that is worth knowing."""


class ManyCall:
    """The items of one call. `params[i]` is an ItemError where that item's own params were at fault."""

    def __init__(
        self,
        connection: Connection,
        prompts: Sequence[Any],
        params: Sequence[EncodedParams | ItemError],
        request_ids: Sequence[str | None],
        priorities: Sequence[int],
        deadlines: Sequence[float | None],
        timeout_s: float | None,
    ) -> None:
        self._connection = connection
        self._prompts = prompts
        self._params = params
        self._request_ids = request_ids
        self._priorities = priorities
        self._deadlines = deadlines
        self._ends_at = None if timeout_s is None else monotonic() + timeout_s
        self._collector = Collector(len(prompts))
        self._tickets: dict[int, Ticket] = {}
        self._started = monotonic()
        self._todo = deque(range(len(prompts)))
        self._limit = connection.welcome.submit_window
        self._num_ended = 0
        self._chunk = self._max_chunk = min(CHUNK, connection.welcome.limits.max_items_per_message)

    def run(self, *, progress: bool | ProgressCallback) -> list[Output]:
        """Run to the end. Raises PoolLost, with what has finished in its `outputs`, when the pool is gone."""
        collector = self._collector
        try:
            with self._connection.call(), make_view(len(self._prompts), progress) as view:
                while not collector.is_done.is_set() and not self._is_late():
                    self._submit_what_fits()
                    self._wait(TICK_S if view.is_live else None)
                    view.update(len(self._prompts) - collector.num_left, collector.num_failed, collector.num_tokens)
                if collector.num_left and collector.error is None:
                    self._abort_left()
                    self._fill_left(TIMEOUT)
                    view.update(len(self._prompts) - collector.num_left, collector.num_failed, collector.num_tokens)
        except PoolLost as error:
            raise _with_outputs(collector, error) from None
        except BaseException:
            self._abort_left()
            raise
        if isinstance(collector.error, PoolLost):
            raise _with_outputs(collector, collector.error)
        if collector.error is not None:
            raise collector.error
        return [output for output in collector.outputs if output is not None]

    def _is_late(self) -> bool:
        return self._ends_at is not None and monotonic() >= self._ends_at

    def _room(self) -> int:
        """What the client's window and this call's own limit still allow; the limit grows by one with each item that ends."""
        num_ended = len(self._prompts) - self._collector.num_left
        self._limit += num_ended - self._num_ended
        self._num_ended = num_ended
        in_flight = self._collector.num_left - len(self._todo)
        return min(self._connection.welcome.submit_window - self._connection.num_pending, self._limit - in_flight)

    def _submit_what_fits(self) -> None:
        if self._collector.refused:
            self._take_back_refused()
        while self._todo and (room := self._room()) > 0 and not self._collector.refused:
            count = min(self._chunk, room, len(self._todo))
            self._submit([self._todo.popleft() for _ in range(count)])
            self._chunk = min(self._max_chunk, self._chunk * 2)

    def _take_back_refused(self) -> None:
        """The backlog was full: keep no more in flight than it took, in smaller messages, and grow again from there."""
        refused = self._collector.take_refused()
        self._todo.extendleft(sorted((output.index for output in refused), reverse=True))
        self._chunk = max(1, self._chunk // 2)
        self._limit = max(1, self._collector.num_left - len(self._todo))
        with self._connection.changed:
            self._connection.changed.wait(RETRY_S)

    def _submit(self, indexes: Sequence[int]) -> None:
        tickets, items, frames = [], [], []
        connection, now = self._connection, monotonic()
        for index in indexes:
            ticket = self._ticket(index, now)
            encoded = self._encode(index, ticket)
            if isinstance(encoded, ItemError):
                self._collector.put(ticket.failed(encoded, connection.welcome.anchor, monotonic()))
                continue
            self._tickets[index] = ticket
            tickets.append(ticket)
            items.append(encoded[0])
            frames.append(encoded[1])
        if tickets:
            connection.submit(tickets, items, frames)

    def _encode(self, index: int, ticket: Ticket) -> tuple[SubmitItem, bytes] | ItemError:
        params = self._params[index]
        if isinstance(params, ItemError):
            return params
        encoded = encode_item(self._prompts[index], params, self._connection.welcome.limits.max_frame_bytes)
        if isinstance(encoded, ItemError):
            return encoded
        ticket.prompt, ticket.prompt_token_ids = encoded.prompt, encoded.prompt_token_ids
        try:
            priority, deadline_s = check_priority(self._priorities[index]), check_deadline(self._deadlines[index])
        except InvalidRequest as error:
            return ItemError(Code.INVALID_REQUEST, str(error))
        return SubmitItem(ticket.seq, priority, deadline_s, params.sequences), encoded.frame

    def _ticket(self, index: int, now: float) -> Ticket:
        seq = self._connection.next_seq()
        request_id = self._request_ids[index]
        name = str(index) if request_id is None else request_id
        return Ticket(seq, index, name, text_of(self._prompts[index]), None, now, self._collector)

    def _wait(self, tick_s: float | None) -> None:
        """Until all is done, there is room to submit, or a tick has passed."""
        left = None if self._ends_at is None else max(0.0, self._ends_at - monotonic())
        limit = min([*(limit for limit in (tick_s, left) if limit is not None), LONGEST_WAIT_S])
        if self._collector.refused:
            return
        if not self._todo:
            self._collector.is_done.wait(limit)
        elif self._room() <= 0:
            with self._connection.changed:
                self._connection.changed.wait(min(limit, TICK_S))

    def _abort_left(self) -> None:
        outputs = self._collector.outputs
        left = [ticket.seq for index, ticket in self._tickets.items() if outputs[index] is None]
        self._connection.give_up(left)

    def _fill_left(self, error: ItemError) -> None:
        """At the timeout: what is missing gets its error here; a late result finds its place taken."""
        now = monotonic()
        for index, output in enumerate(list(self._collector.outputs)):
            if output is None:
                ticket = self._tickets.get(index) or self._ticket(index, self._started)
                self._collector.put(ticket.failed(error, self._connection.welcome.anchor, now))


def warn_of(outputs: Sequence[Output], params: Sequence[EncodedParams | ItemError], stacklevel: int) -> None:
    """One warning that sums up failures by kind, and cut-offs where nobody had set `max_tokens`."""
    parts = []
    failures = Counter(output.error.code.value for output in outputs if output.error is not None)
    if failures:
        first = next(output for output in outputs if output.error is not None)
        kinds = ", ".join(f"{count} {code}" for code, count in failures.most_common())
        parts.append(f"{failures.total()} of {len(outputs)} items failed ({kinds}); the first is item {first.index}: {first.error}")
    cut = sum(
        output.finish_reason == "length" and isinstance(param, EncodedParams) and param.is_default_length
        for output, param in zip(outputs, params, strict=True)
    )
    if cut:
        parts.append(f"{cut} of {len(outputs)} outputs were cut off at vLLM's default of 16 tokens; set max_tokens")
    if parts:
        warnings.warn("; ".join(parts), EnginePoolWarning, stacklevel=stacklevel)


def raise_first(outputs: list[Output]) -> None:
    """Raise ItemFailed for the first failed item, with all outputs in it."""
    for output in outputs:
        if output.error is not None:
            raise ItemFailed(f"item {output.index} ({output.request_id}): {output.error}", output.error, list(outputs))


def _with_outputs(collector: Collector, error: PoolLost) -> PoolLost:
    done = [output for output in collector.outputs if output is not None]
    text = f"{error} ({len(done)} of {len(collector.outputs)} items had finished; they are in `outputs`)"
    return PoolLost(text, list(done))

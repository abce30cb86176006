"""What every verb does before it waits: checks the call, encodes its items and sends them. Nothing here blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from enginepool.client.connection import Connection
from enginepool.client.flight import Flight, Job
from enginepool.client.iterate import DEFAULT_WINDOW, JobMaker, Window
from enginepool.client.mailbox import Mailbox
from enginepool.client.outputs import Output
from enginepool.client.progress import View
from enginepool.client.requests import (
    Encode,
    EncodedParams,
    Params,
    check_deadline,
    check_priority,
    encode_sampling,
    spread,
    text_of,
)
from enginepool.client.stream import StreamEnd
from enginepool.client.ticket import Sink, Ticket
from enginepool.clock import monotonic
from enginepool.errors import Code, InvalidRequest, ItemError
from enginepool.protocol import SubmitItem
from enginepool.sampling import SamplingParams

TIMEOUT = ItemError(Code.TIMEOUT, "the call's timeout_s passed before this item finished")


class Single(msgspec.Struct, frozen=True):
    """One item of a verb for one: what to run, with what, and where it stands in the queue."""

    encode: Encode
    value: Any
    params: Params = None
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None

    def send(self, connection: Connection, sink: Sink, stream: StreamEnd | None = None) -> Ticket:
        """Send it; its result goes to `sink`. Raises InvalidRequest, PoolLost and PoolClosed."""
        check_priority(self.priority)
        check_deadline(self.deadline_s)
        if self.request_id is not None and not isinstance(self.request_id, str):
            raise InvalidRequest(f"request_id is text, not {self.request_id!r:.40}")
        seq, now = connection.next_seq(), monotonic()
        name = str(seq) if self.request_id is None else self.request_id
        ticket = Ticket(seq, 0, name, text_of(self.value), None, now, sink, stream)
        encoded = self.encode(self.value, encode_sampling(self.params), connection.welcome.limits.max_frame_bytes)
        if isinstance(encoded, ItemError):
            sink.put(ticket.failed(encoded, connection.welcome.anchor, monotonic()))
            return ticket
        ticket.prompt, ticket.prompt_token_ids = encoded.prompt, encoded.prompt_token_ids
        item = SubmitItem(seq, self.priority, self.deadline_s, encoded.params.sequences)
        connection.submit([ticket], [item], [encoded.frame])
        return ticket


def timed_out(connection: Connection, ticket: Ticket) -> Output:
    """Give an item up at the call's time limit."""
    connection.give_up([ticket.seq])
    return ticket.failed(TIMEOUT, connection.welcome.anchor, monotonic())


def make_jobs(values: Sequence[Any], params: Any, request_ids: Any, priorities: Any, deadline_s: Any) -> list[Job]:
    """The items of a `*_many` call. What is given once is checked once and raises; of many, each bad one is its item's error."""
    if not isinstance(priorities, Sequence):
        check_priority(priorities)
    if not isinstance(deadline_s, Sequence):
        check_deadline(deadline_s)
    count = len(values)
    columns = (
        values,
        _encode_all(params, count),
        spread("request_ids", _checked_ids(request_ids), count),
        spread("priorities", priorities, count),
        spread("deadline_s", deadline_s, count),
    )
    return [Job(index, *row) for index, row in enumerate(zip(*columns, strict=True))]


def make_window(
    connection: Connection,
    encode: Encode,
    mailbox: Mailbox[Output],
    view: View,
    params: Any,
    *,
    priority: int,
    deadline_s: float | None,
    window: int | None,
    in_order: bool,
) -> Window:
    """The state of an `iter_*many` call. Raises InvalidRequest."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise InvalidRequest(f"window is a number of items, at least 1, not {window!r:.40}")
    maker = JobMaker(params, check_priority(priority), check_deadline(deadline_s))
    size = min(DEFAULT_WINDOW, connection.welcome.submit_window) if window is None else window
    return Window(Flight(connection, encode, mailbox), maker, size, view, in_order=in_order)


def count_of(items: Any) -> int | None:
    """How many items an iterable has, where it knows."""
    try:
        return len(items)
    except TypeError:
        return None


def _checked_ids(request_ids: Sequence[str] | None) -> Sequence[str] | None:
    if request_ids is None:
        return None
    if isinstance(request_ids, str) or not isinstance(request_ids, Sequence) or not all(isinstance(name, str) for name in request_ids):
        raise InvalidRequest("request_ids is a list with one string a prompt")
    return request_ids


def _encode_all(params: Any, count: int) -> list[EncodedParams | ItemError]:
    if isinstance(params, Mapping | SamplingParams) or not isinstance(params, Sequence):
        return [encode_sampling(params)] * count
    encoded: list[EncodedParams | ItemError] = []
    for one in spread("params", params, count):
        try:
            encoded.append(encode_sampling(one))
        except InvalidRequest as error:
            encoded.append(ItemError(Code.INVALID_REQUEST, str(error)))
    return encoded

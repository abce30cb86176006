"""A flight: the items of one call between submission and end, within the client's window; the caller's thread or task drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from enginepool.client.connection import Connection
from enginepool.client.mailbox import Mailbox
from enginepool.client.outputs import Output
from enginepool.client.requests import Encode, EncodedParams, check_deadline, check_priority, text_of
from enginepool.client.ticket import Ticket
from enginepool.clock import monotonic
from enginepool.errors import Code, EnginePoolError, InvalidRequest, ItemError, PoolClosed, PoolLost
from enginepool.protocol import SubmitItem

CHUNK = 64
RETRY_S = 0.05
LONGEST_WAIT_S = 1.0


class Job(msgspec.Struct, frozen=True):
    """One item as the caller wrote it; `params` is an ItemError where they were at fault."""

    index: int
    value: Any
    params: EncodedParams | ItemError
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None


class _Sent(msgspec.Struct, frozen=True):
    """What it takes to send an item once more."""

    ticket: Ticket
    item: SubmitItem
    frame: bytes


class Inbox:
    """The sink of a flight: what has ended and what was refused, told by the receiving thread and by the caller's own."""

    def __init__(self, mailbox: Mailbox[Output]) -> None:
        self.mailbox = mailbox
        self.refused: deque[int] = deque()
        self.error: EnginePoolError | None = None

    def put(self, output: Output) -> None:
        """One item has ended."""
        self.mailbox.push(output)

    def refuse(self, output: Output) -> None:
        """Not accepted: a full backlog is tried again, anything else is the item's end."""
        if output.error is not None and output.error.code is Code.OVERLOADED:
            self.refused.append(output.index)
            self.mailbox.poke()
        else:
            self.put(output)

    def lose(self, error: EnginePoolError) -> None:
        """The pool is gone."""
        self.error = error
        self.mailbox.poke()


class Flight:
    """Sends jobs in chunks, never more than `room`, and hands out their outputs, each once."""

    def __init__(self, connection: Connection, encode: Encode, mailbox: Mailbox[Output]) -> None:
        self._connection = connection
        self._encode = encode
        self._inbox = Inbox(mailbox)
        self._sent: dict[int, _Sent] = {}
        self._again: deque[int] = deque()
        self._again_at = 0.0
        self._limit = connection.welcome.submit_window
        self.chunk = self._max_chunk = min(CHUNK, connection.welcome.limits.max_items_per_message)

    @property
    def num_open(self) -> int:
        """Items that were started and have not ended."""
        return len(self._sent)

    @property
    def has_news(self) -> bool:
        """Whether `advance` has outputs to return."""
        return len(self._inbox.mailbox) > 0

    @property
    def is_lost(self) -> bool:
        """Whether nothing more will come; whatever came before lies there when this is true."""
        return self._inbox.error is not None

    def check(self) -> None:
        """Raise PoolLost or PoolClosed when nothing more will come."""
        if self._inbox.error is not None:
            raise self._inbox.error

    @property
    def room(self) -> int:
        """How many items may be started now; the limit that a full backlog set grows by one with each item that ends."""
        if self._again or self._inbox.refused:
            return 0
        return self._window_left()

    @property
    def retry_s(self) -> float:
        """How soon to look again though nobody called: what was refused is tried again, another call may have made room."""
        if self._again:
            return max(0.001, self._again_at - monotonic())
        return RETRY_S if self._connection.num_pending >= self._connection.welcome.submit_window else LONGEST_WAIT_S

    def start(self, jobs: Sequence[Job]) -> None:
        """Encode and send; a job that can't be sent ends at once. Raises PoolLost and PoolClosed."""
        now, fresh = monotonic(), []
        for job in jobs:
            ticket = self._ticket(job, now)
            encoded = self._encode_job(job, ticket)
            if isinstance(encoded, ItemError):
                self._inbox.put(ticket.failed(encoded, self._connection.welcome.anchor, monotonic()))
            else:
                self._sent[job.index] = encoded
                fresh.append(encoded)
        self._send(fresh)
        self.chunk = min(self._max_chunk, self.chunk * 2)

    def advance(self) -> list[Output]:
        """Send again what was refused, as far as there is room, and return what has ended."""
        outputs = self.take()
        if self._inbox.refused:
            self._take_back_refused()
        if self._again and monotonic() >= self._again_at:
            try:
                self._send_again()
            except (PoolLost, PoolClosed):
                if not outputs:
                    raise  # otherwise what has ended is handed out first, and the next call raises
        return outputs

    def take(self) -> list[Output]:
        """Return what has ended, and send nothing: also when the pool is gone."""
        outputs = self._inbox.mailbox.take()
        for output in outputs:
            self._sent.pop(output.index, None)
        self._limit += len(outputs)
        return outputs

    def end(self, jobs: Sequence[Job], error: ItemError) -> list[Output]:
        """The outputs of jobs that end here, started or not; what still comes for them is dropped."""
        now = monotonic()
        sent = [self._sent.pop(job.index, None) for job in jobs]
        self._connection.give_up([one.ticket.seq for one in sent if one is not None])
        tickets = [self._ticket(job, now) if one is None else one.ticket for job, one in zip(jobs, sent, strict=True)]
        return [ticket.failed(error, self._connection.welcome.anchor, now) for ticket in tickets]

    def abort(self) -> None:
        """Nobody wants the rest any more."""
        seqs = [sent.ticket.seq for sent in self._sent.values()]
        self._sent.clear()
        self._connection.give_up(seqs)

    def _window_left(self) -> int:
        in_flight = len(self._sent) - len(self._again)
        return min(self._connection.welcome.submit_window - self._connection.num_pending, self._limit - in_flight)

    def _take_back_refused(self) -> None:
        """The backlog was full: keep no more in flight than it took, in smaller messages, and grow again from there."""
        refused = [self._inbox.refused.popleft() for _ in range(len(self._inbox.refused))]
        self._again.extendleft(sorted((index for index in refused if index in self._sent), reverse=True))
        self.chunk = max(1, self.chunk // 2)
        self._limit = max(1, len(self._sent) - len(self._again))
        self._again_at = monotonic() + RETRY_S

    def _send_again(self) -> None:
        count = min(self.chunk, self._window_left(), len(self._again))
        if count > 0:
            self._send([self._sent[index] for index in islice(self._again, count)])
            for _ in range(count):
                self._again.popleft()
            self.chunk = min(self._max_chunk, self.chunk * 2)

    def _send(self, sent: Sequence[_Sent]) -> None:
        if sent:
            self._connection.submit([one.ticket for one in sent], [one.item for one in sent], [one.frame for one in sent])

    def _encode_job(self, job: Job, ticket: Ticket) -> _Sent | ItemError:
        if isinstance(job.params, ItemError):
            return job.params
        encoded = self._encode(job.value, job.params, self._connection.welcome.limits.max_frame_bytes)
        if isinstance(encoded, ItemError):
            return encoded
        ticket.prompt, ticket.prompt_token_ids = encoded.prompt, encoded.prompt_token_ids
        try:
            priority, deadline_s = check_priority(job.priority), check_deadline(job.deadline_s)
        except InvalidRequest as error:
            return ItemError(Code.INVALID_REQUEST, str(error))
        return _Sent(ticket, SubmitItem(ticket.seq, priority, deadline_s, job.params.sequences), encoded.frame)

    def _ticket(self, job: Job, now: float) -> Ticket:
        name = str(job.index) if job.request_id is None else job.request_id
        return Ticket(self._connection.next_seq(), job.index, name, text_of(job.value), None, now, self._inbox)

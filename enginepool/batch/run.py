"""The loop of a run: reads lines while there is room, writes results as they come, and looks after everything that can end it early."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import msgspec

from enginepool.batch.answers import LineWriter
from enginepool.batch.feed import Entry
from enginepool.batch.interrupts import Interrupts
from enginepool.batch.ledger import LineRecord
from enginepool.batch.outbox import Outbox, Ready
from enginepool.batch.request import BatchRequest, LineFault
from enginepool.client.connection import Connection, Question
from enginepool.client.flight import Flight, Job
from enginepool.client.mailbox import ThreadMailbox
from enginepool.client.openai import encode_openai, sequences_only
from enginepool.client.outputs import Output
from enginepool.clock import Timings, monotonic
from enginepool.errors import CallerError, Code, ItemError, SettingsError
from enginepool.payload import OpenAIRequest
from enginepool.status import PoolStatus

SYNC_S = 1.0
STATUS_S = 1.0
LONGEST_SLEEP_S = 0.2
LEAST_WINDOW = 64
MAX_BYTES = 128 << 20
"""Requests in flight, and results that wait for their turn: no more than so many bytes of each."""
NO_TEMPLATE = ("must provide a chat template", "has no chat template")
"""What vLLM and transformers say of a model that can't take conversations."""
NOT_DONE = (Code.DRAINING, Code.POOL_LOST, Code.OVERLOADED)
"""The pool gave these back; another pool, or the same command later, may do them."""


class Watcher(Protocol):
    """Who is told how a run goes."""

    def ended(self, record: LineRecord) -> None:
        """A line has ended."""

    def status(self, status: PoolStatus) -> None:
        """What the pool does."""

    def notice(self, text: str) -> None:
        """Something that a person should read."""


class NoTemplate(CallerError):
    """All lines are conversations, and the model has no chat template: there is no use in trying them one by one."""


class End(enum.Enum):
    """How a run came to its end."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    POOL_STOPPED = "pool stopped"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent. `window` is how many lines are in flight at most; None: what keeps the workers busy."""

    window: int | None = None
    priority: int = 0
    is_strict: bool = False
    is_ordered: bool = False
    is_all_chat: bool = False


class BatchRun:
    """One pass over the lines that are not done yet; the caller's thread drives it."""

    def __init__(
        self, connection: Connection, feed: Iterator[Entry], outbox: Outbox, lines: LineWriter, watcher: Watcher, options: Options
    ) -> None:
        self._connection = connection
        self._feed = feed
        self._outbox = outbox
        self._lines = lines
        self._watcher = watcher
        self._options = options
        self._mailbox = ThreadMailbox[Output]()
        self._flight = Flight(connection, encode_openai, self._mailbox)
        self._window = options.window or LEAST_WINDOW
        self._bytes: dict[int, int] = {}
        self._num_bytes = 0
        self._is_read_out = False
        self._is_given_back = False
        self._unreadable: SettingsError | None = None
        self._sync_at = monotonic() + SYNC_S
        self._status = _StatusAsker(connection)

    def run(self, interrupts: Interrupts) -> End:
        """Work until all is done, or until something ends it.

        Raises PoolLost when the dispatcher is gone, OutputFailed when results can't be written, SettingsError when the input can't be
        read on, NoTemplate when no line can be run: what was written stands.
        """
        is_told = False
        self._outbox.give_up_when(lambda: interrupts.count > 1)
        try:
            while True:
                if interrupts.count and not is_told:
                    is_told = self._begin_end()
                if interrupts.count > 1:
                    return End.INTERRUPTED
                has_news = self._step(is_reading=not (interrupts.count or self._is_given_back))
                if not self._flight.num_open and (self._is_read_out or interrupts.count or self._is_given_back):
                    return self._how_it_ended(interrupts)
                if not has_news:
                    self._mailbox.wait(min(self._flight.retry_s, LONGEST_SLEEP_S))
        finally:
            for output in self._flight.take():
                self._take(output)
            self._flight.abort()
            self._status.close()
            self._outbox.flush()
            self._outbox.sync()

    def _step(self, *, is_reading: bool) -> bool:
        """Take what has come, write it, and read on; False when there was nothing to do."""
        is_lost = self._flight.is_lost
        outputs = self._flight.advance()
        if is_lost and not outputs:
            self._flight.check()
        for output in outputs:
            self._take(output)
        num_read = self._read() if is_reading and not self._is_read_out else 0
        self._outbox.flush()
        self._tick()
        return bool(outputs or num_read)

    def _begin_end(self) -> bool:
        num = self._flight.num_open
        self._watcher.notice(f"interrupted: finishing {num} line{'s'[: num != 1]} in flight, reading no more; once more to stop at once")
        return True

    def _how_it_ended(self, interrupts: Interrupts) -> End:
        if self._unreadable is not None:
            raise self._unreadable
        if self._is_given_back:
            return End.POOL_STOPPED
        return End.COMPLETE if self._is_read_out and not self._flight.num_open else End.INTERRUPTED

    def _read(self) -> int:
        jobs: list[Job] = []
        num_read = 0
        while len(jobs) < self._flight.chunk and self._has_room(len(jobs)):
            entry = self._next()
            if entry is None:
                self._is_read_out = True
                break
            num_read += 1
            self._begin(entry, jobs)
        if jobs:
            self._flight.start(jobs)
        return num_read

    def _next(self) -> Entry | None:
        """The next line; where the input can't be read on, what is in flight is finished first."""
        try:
            return next(self._feed, None)
        except SettingsError as error:
            self._unreadable = error
            return None

    def _has_room(self, num_new: int) -> bool:
        """Whether one more line may be begun. In an ordered run those that wait for an earlier one count too."""
        open_now = max(self._flight.num_open + num_new, self._outbox.span)
        is_within = self._num_bytes < MAX_BYTES and self._outbox.held_bytes < MAX_BYTES
        return open_now < self._window and self._flight.room > num_new and (is_within or open_now == 0)

    def _begin(self, entry: Entry, jobs: list[Job]) -> None:
        number, what = entry.number, entry.what
        self._outbox.expect(number)
        match what:
            case BatchRequest():
                request = OpenAIRequest(what.url, what.body, self._options.is_strict)
                params = sequences_only(what.sequences)
                jobs.append(Job(number, request, params, what.custom_id, self._options.priority))
                self._bytes[number] = len(what.body)
                self._num_bytes += len(what.body)
            case LineFault():
                self._outbox.put(number, Ready(self._lines.of_fault(number, what), is_failed=True))
                self._watcher.ended(_fault_record(number, what))
            case _:
                self._outbox.put(number, Ready(what, is_failed=False, is_new=False))

    def _take(self, output: Output) -> None:
        self._num_bytes -= self._bytes.pop(output.index, 0)
        if output.error is not None and output.error.code in NOT_DONE:
            self._is_given_back = True
            return
        if self._options.is_all_chat and output.error is not None:
            _check_template(output.error)
        data = self._lines.of_output(output.index, output.request_id, output)
        self._outbox.put(output.index, Ready(data, output.error is not None))
        self._watcher.ended(record_of(output))
        if output.answer is not None:
            for notice in output.answer.notices:
                self._watcher.notice(notice)

    def _tick(self) -> None:
        now = monotonic()
        if now >= self._sync_at:
            self._sync_at = now + SYNC_S
            self._outbox.sync()
        status = self._status.look(now)
        if status is not None:
            self._watcher.status(status)
            self._window = self._options.window or choose_window(status)

    def wake(self) -> None:
        """Look at what has changed (also from a signal handler)."""
        self._mailbox.poke()


def choose_window(status: PoolStatus) -> int:
    """Twice what the workers want in hand: enough that none runs dry, and little to wait for when the run is interrupted."""
    return max(LEAST_WINDOW, 2 * sum(worker.window for worker in status.workers))


class _StatusAsker:
    """Asks the pool what it does, once in a while and without waiting."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._question: Question | None = None
        self._stack = ExitStack()
        self._next = monotonic()

    def look(self, now: float) -> PoolStatus | None:
        """A fresh status, or None."""
        if self._question is not None and self._question.is_over:
            question, self._question = self._question, None
            self._stack.close()
            return None if self._connection.is_lost else question.answer()
        if self._question is None and now >= self._next and not self._connection.is_lost:
            self._next = now + STATUS_S
            self._question = self._stack.enter_context(self._connection.asked())
        return None

    def close(self) -> None:
        """Forget the question."""
        self._stack.close()


def _check_template(error: ItemError) -> None:
    if any(words in error.message for words in NO_TEMPLATE):
        way_out = "give one with `-- --chat-template FILE`, or a model that has been tuned for conversations"
        raise NoTemplate(f"all lines are conversations and the model has no chat template, so nothing was run; {way_out}")


def record_of(output: Output) -> LineRecord:
    """What is to be counted of a line that the pool has ended."""
    error, answer = output.error, output.answer
    return LineRecord(
        output.index,
        output.request_id,
        error is None,
        None if error is None else error.code.value,
        None if error is None else error.message,
        output.worker,
        output.attempts,
        0 if answer is None else answer.prompt_tokens,
        0 if answer is None else answer.completion_tokens,
        output.timings,
    )


def _fault_record(number: int, fault: LineFault) -> LineRecord:
    return LineRecord(number, fault.custom_id, False, Code.INVALID_REQUEST.value, fault.message, None, 0, 0, 0, Timings())

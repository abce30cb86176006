"""The feeder: keeps one engine fed from the link and sends each result the moment the batching mode allows.

Continuous: new items join between steps, each result leaves when it is finished. Static: one message is one batch and
its results leave together (a stream's deltas leave at once). Both drive the same step loop, so aborts and drains work in
both. Its stages (pull, admit, step, encode) are profiler scopes where vLLM's profiling variables ask for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from enginepool import payload
from enginepool.clock import EngineStamps, encode_stamps, monotonic
from enginepool.errors import Code, ItemError
from enginepool.payload import Request
from enginepool.protocol import NO_STAMPS, Abort, Delta, Done, DoneItem, Drain, Message, Stop
from enginepool.recorder import FlightRecorder
from enginepool.status import Load
from enginepool.worker.engine import Engine, EngineBroken, Event, Finished, RefusedItem, Streamed
from enginepool.worker.link import Batch, Command
from enginepool.worker.stuck import StuckItems

IDLE_STEP_S = 0.0002
IDLE_SLEEP_S = 0.001
LOAD_INTERVAL_S = 0.5
ABORTED = ItemError(Code.ABORTED, "aborted by the caller")


class Outlet(Protocol):
    """Where commands come from and results go (the link)."""

    def take(self, *, wait: bool) -> Command | None: ...

    def send(self, message: Message, payloads: Sequence[bytes] = ()) -> None: ...


class FeederLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A result larger than `max_frame_bytes`, or an item that others overtake for `stall_s`, becomes that item's error."""

    max_frame_bytes: int
    stall_s: float


class Feeder:
    """Runs the engine until it is told to stop; any exception out of `run` means the engine is lost."""

    def __init__(self, engine: Engine, link: Outlet, recorder: FlightRecorder, limits: FeederLimits, *, is_static: bool) -> None:
        self.load = Load()
        self._engine = engine
        self._link = link
        self._is_static = is_static
        self._recorder = recorder
        self._limits = limits
        self._stuck = StuckItems(limits.stall_s)
        self._progress = 0
        self._in_hand: dict[int, None] = {}
        self._batch_sizes = (0, 0)
        self._ended: list[DoneItem] = []
        self._payloads: list[bytes] = []
        self._streams: list[int] = []
        self._deltas: list[bytes] = []
        self._scope = engine.scope
        self._is_stopping = False
        self._is_draining = False
        self._load_at = 0.0

    def run(self) -> None:
        """Take commands, step, send; waits without stepping while there is nothing to do."""
        while not self._is_stopping:
            if self._in_hand:
                self._take_commands()
                self._step()
            elif self._is_draining:
                return
            else:
                self._take_first()

    def _take_first(self) -> None:
        """Wait for work; the load of an idle engine is told only when it stays idle."""
        command = self._link.take(wait=False)
        if command is None:
            self._refresh_load(force=True)
            command = self._link.take(wait=True)
        if command is not None:
            self._obey(command)

    def _take_commands(self) -> None:
        with self._scope("enginepool worker: pull"):
            while not self._is_stopping and (command := self._link.take(wait=False)) is not None:
                self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Batch(leases, requests, arrived):
                self._batch_sizes = (self._batch_sizes[0] + len(leases), self._batch_sizes[1])
                with self._scope("enginepool worker: admit"):
                    for lease, request in zip(leases, requests, strict=True):
                        self._admit(lease, request, arrived)
                self._release()
            case Abort(leases):
                self._abort(leases)
            case Drain():
                self._is_draining = True
            case Stop():
                self._is_stopping = True

    def _admit(self, lease: int, request: Request | Exception, arrived: float) -> None:
        if isinstance(request, Exception):
            self._count_returned()
            self._end(lease, b"", ItemError(Code.INVALID_REQUEST, f"the request could not be read: {request}"))
            return
        self._in_hand[lease] = None
        self._recorder.begin_admission(lease)  # what raises anything else leaves it so: the last thing that was begun
        try:
            self._engine.admit(lease, request, arrived)
        except RefusedItem as refused:
            del self._in_hand[lease]
            self._count_returned()
            self._end(lease, b"", refused.error)
        self._recorder.end_admission()

    def _abort(self, leases: list[int]) -> None:
        mine = [lease for lease in leases if lease in self._in_hand]
        self._engine.abort(mine)
        for lease in mine:
            del self._in_hand[lease]
            self._count_returned()
        if mine:
            self._link.send(Done([DoneItem(lease, ABORTED) for lease in mine]), [b""] * len(mine))
        self._release()

    def _step(self) -> None:
        if not self._in_hand:
            return
        started = monotonic()
        with self._scope("enginepool worker: step"):
            events = self._engine.step()
        self._recorder.completed_step()
        self._note_progress(events)
        if events:
            with self._scope("enginepool worker: encode"):
                self._collect(events)
        self._release()
        if self._in_hand and not self._engine.has_unfinished:
            given, returned = self._batch_sizes
            raise EngineBroken(f"the engine was given {given} items and returned {returned}; {len(self._in_hand)} are missing")
        if not events and monotonic() - started < IDLE_STEP_S:
            time.sleep(IDLE_SLEEP_S)
        self._refresh_load()

    def _note_progress(self, events: list[Event]) -> None:
        """Tokens computed or items finished; a step that returned is none."""
        progress = self._engine.progress
        if events or progress != self._progress:
            self._progress = progress
            self._recorder.progressed()

    def _end_stuck(self, now: float) -> None:
        """An item that the engine has put aside for good ends here, and so does the engine: part of it is busy with that item."""
        stuck = self._stuck.look(self._engine.token_counts(), self._engine.blocked(), now)
        if stuck is not None:
            text = f"no token for {self._limits.stall_s:g} s (stall_timeout_s), though its engine was free to go on"
            self._link.send(Done([DoneItem(stuck, ItemError(Code.TIMEOUT, text))]), [b""])
            raise EngineBroken(f"an item got {text}; its engine is replaced")

    def _collect(self, events: list[Event]) -> None:
        for event in events:
            if event.lease not in self._in_hand:
                raise EngineBroken(f"the engine returned an item that it does not hold (lease {event.lease})")
            if isinstance(event, Streamed):
                self._streams.append(event.lease)
                self._deltas.append(payload.encode(event.parts))
            else:
                self._finish(event)

    def _finish(self, finished: Finished) -> None:
        del self._in_hand[finished.lease]
        self._count_returned()
        result = finished.result
        if isinstance(result, ItemError):
            self._end(finished.lease, b"", result, finished.stamps)
            return
        data = payload.encode(result)
        if len(data) > self._limits.max_frame_bytes:
            limit = f"max_frame_bytes ({self._limits.max_frame_bytes})"
            text = f"the result has {len(data)} bytes, more than {limit}; ask for fewer logprobs or tokens"
            self._end(finished.lease, b"", ItemError(Code.RESULT_TOO_LARGE, text), finished.stamps)
        else:
            self._end(finished.lease, data, None, finished.stamps)

    def _count_returned(self) -> None:
        self._batch_sizes = (self._batch_sizes[0], self._batch_sizes[1] + 1)

    def _end(self, lease: int, data: bytes, error: ItemError | None, stamps: EngineStamps | None = None) -> None:
        self._ended.append(DoneItem(lease, error, NO_STAMPS if stamps is None else msgspec.Raw(encode_stamps(stamps))))
        self._payloads.append(data)

    def _release(self) -> None:
        """Send what is new in streams and what has ended; a static batch leaves whole."""
        if self._streams:
            streams, deltas = self._streams, self._deltas
            self._streams, self._deltas = [], []
            self._link.send(Delta(streams), deltas)
        if not self._in_hand:
            self._batch_sizes = (0, 0)
        if self._ended and not (self._is_static and self._in_hand):
            ended, payloads = self._ended, self._payloads
            self._ended, self._payloads = [], []
            self._link.send(Done(ended), payloads)

    def _refresh_load(self, *, force: bool = False) -> None:
        now = monotonic()
        if force or now >= self._load_at:
            self._load_at = now + LOAD_INTERVAL_S
            self._end_stuck(now)
            self.load = self._engine.load()

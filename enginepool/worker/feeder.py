"""The feeder: keeps one engine fed from the link and sends each result the moment the batching mode allows.

Continuous: new items join between steps, each result leaves when it is finished. Static: one message is one batch and
its results leave together. Both drive the same step loop, so aborts and drains work in both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from enginepool import payload
from enginepool.clock import monotonic
from enginepool.errors import Code, ItemError
from enginepool.payload import GenerateRequest
from enginepool.protocol import Abort, Done, DoneItem, Drain, Message, Stop
from enginepool.status import Load
from enginepool.worker.engine import Engine, EngineBroken, Finished, RefusedItem
from enginepool.worker.link import Batch, Command

IDLE_STEP_S = 0.0002
IDLE_SLEEP_S = 0.001
LOAD_INTERVAL_S = 0.5
ABORTED = ItemError(Code.ABORTED, "aborted by the caller")


class Outlet(Protocol):
    """Where commands come from and results go (the link)."""

    def take(self, *, wait: bool) -> Command | None: ...

    def send(self, message: Message, payloads: Sequence[bytes] = ()) -> None: ...


class Feeder:
    """Runs the engine until it is told to stop; any exception out of `run` means the engine is lost."""

    def __init__(self, engine: Engine, link: Outlet, *, is_static: bool, max_frame_bytes: int) -> None:
        self.load = Load()
        self._engine = engine
        self._link = link
        self._is_static = is_static
        self._max_frame_bytes = max_frame_bytes
        self._in_hand: dict[int, None] = {}
        self._batch_sizes = (0, 0)
        self._ended: list[DoneItem] = []
        self._payloads: list[bytes] = []
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
        while not self._is_stopping and (command := self._link.take(wait=False)) is not None:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Batch(leases, requests, arrived):
                self._batch_sizes = (self._batch_sizes[0] + len(leases), self._batch_sizes[1])
                for lease, request in zip(leases, requests, strict=True):
                    self._admit(lease, request, arrived)
                self._release()
            case Abort(leases):
                self._abort(leases)
            case Drain():
                self._is_draining = True
            case Stop():
                self._is_stopping = True

    def _admit(self, lease: int, request: GenerateRequest | Exception, arrived: float) -> None:
        if isinstance(request, Exception):
            self._count_returned()
            self._end(lease, b"", ItemError(Code.INVALID_REQUEST, f"the request could not be read: {request}"))
            return
        self._in_hand[lease] = None
        try:
            self._engine.admit(lease, request, arrived)
        except RefusedItem as refused:
            del self._in_hand[lease]
            self._count_returned()
            self._end(lease, b"", refused.error)

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
        finished = self._engine.step()
        for ended in finished:
            self._collect(ended)
        self._release()
        if self._in_hand and not self._engine.has_unfinished:
            given, returned = self._batch_sizes
            raise EngineBroken(f"the engine was given {given} items and returned {returned}; {len(self._in_hand)} are missing")
        if not finished and monotonic() - started < IDLE_STEP_S:
            time.sleep(IDLE_SLEEP_S)
        self._refresh_load()

    def _collect(self, ended: Finished) -> None:
        lease, result = ended
        if lease not in self._in_hand:
            raise EngineBroken(f"the engine returned an item that it does not hold (lease {lease})")
        del self._in_hand[lease]
        self._count_returned()
        if isinstance(result, ItemError):
            self._end(lease, b"", result)
            return
        data = payload.encode(result)
        if len(data) > self._max_frame_bytes:
            text = (
                f"the result has {len(data)} bytes, more than max_frame_bytes ({self._max_frame_bytes}); ask for fewer logprobs or tokens"
            )
            self._end(lease, b"", ItemError(Code.RESULT_TOO_LARGE, text))
        else:
            self._end(lease, data, None)

    def _count_returned(self) -> None:
        self._batch_sizes = (self._batch_sizes[0], self._batch_sizes[1] + 1)

    def _end(self, lease: int, data: bytes, error: ItemError | None) -> None:
        self._ended.append(DoneItem(lease, error))
        self._payloads.append(data)

    def _release(self) -> None:
        """Send what has ended; a static batch leaves whole."""
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
            self.load = self._engine.load()

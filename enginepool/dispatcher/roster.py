"""The roster: each worker's state, its restart budget and back-off, and the pool's state that follows from them.

Pure: time is an argument. The supervisor tells what happened to processes, the loop does what the roster decides.
"""

from __future__ import annotations

import math
from collections import deque

from enginepool.dispatcher.vigil import Hang, Watch
from enginepool.errors import ExitCode
from enginepool.status import Load, PoolState, WorkerState

MAX_BACKOFF_S = 30.0
RATE_SPAN_S = 5.0
FAILURE_EXITS = {"usage": ExitCode.USAGE, "missing": ExitCode.ENGINE_MISSING}


class RestartBudget:
    """At most `max_restarts` within `window_s`; the wait doubles from `backoff_s` with each restart in the window.

    Deaths without a good start in between count however far apart they are, for a start may take longer than the window.
    """

    def __init__(self, max_restarts: int, window_s: float, backoff_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self.backoff_s = backoff_s
        self._deaths: deque[tuple[float, bool]] = deque()
        self._num_since_good = 0

    def spend(self, now: float, *, is_charged: bool = True) -> float | None:
        """Note one death; returns the seconds to wait before the restart, or None when the budget is spent.

        A death that is not charged makes the wait longer, but the worker is not given up for it.
        """
        while self._deaths and now - self._deaths[0][0] > self.window_s:
            self._deaths.popleft()
        self._deaths.append((now, is_charged))
        self._num_since_good += is_charged
        num_charged = max(sum(charged for _, charged in self._deaths), self._num_since_good)
        if is_charged and num_charged > self.max_restarts:
            return None
        return float(min(MAX_BACKOFF_S, self.backoff_s * 2 ** min(max(len(self._deaths), self._num_since_good) - 1, 16)))

    def was_good(self) -> None:
        """The worker has started well."""
        self._num_since_good = 0

    def refund(self, *, is_charged: bool = True) -> None:
        """A death turned out to be an item's doing, not the worker's: forget the latest of its kind."""
        death = next((death for death in reversed(self._deaths) if death[1] is is_charged), None)
        if death is not None:
            self._deaths.remove(death)
            self._num_since_good = max(0, self._num_since_good - is_charged)


class Slot:
    """One worker's place in the pool: it outlives the processes that fill it."""

    def __init__(self, index: int, budget: RestartBudget) -> None:
        self.index = index
        self.budget = budget
        self.state = WorkerState.BACKOFF
        self.start_at = 0.0
        self.deadline = math.inf
        self.pid: int | None = None
        self.peer: bytes | None = None
        self.stage = "waiting"
        self.restarts = -1
        self.last_exit: str | None = None
        self.last_exit_at = -math.inf
        self.failure: str | None = None
        self.failure_kind: str | None = None
        self.farewell: str | None = None
        self.capacity = 0
        self.prefetch = 0
        self.num_beats = 0
        self.hang: Hang | None = None
        self.hang_text: str | None = None
        self.hang_lease: int | None = None
        self.kill_at = math.inf
        self.is_killed = False
        self.watch: Watch | None = None
        self.load = Load()
        self._samples: deque[tuple[float, int, int]] = deque()

    def started(self, pid: int, now: float, start_timeout_s: float) -> None:
        """A process was started."""
        self.state, self.pid, self.peer = WorkerState.STARTING, pid, None
        self.stage, self.failure, self.failure_kind, self.farewell = "starting", None, None, None
        self.restarts += 1
        self.deadline = now + start_timeout_s
        self.num_beats, self.watch, self.is_killed = 0, None, False
        self.pardoned()
        self.load = Load()
        self._samples.clear()

    def progressed(self, now: float, start_timeout_s: float, stage: str | None = None) -> None:
        """A start-up milestone or log line: the start deadline begins anew."""
        if self.state is WorkerState.STARTING:
            self.stage = stage or self.stage
            self.deadline = now + start_timeout_s

    def became_ready(self) -> None:
        """A token was generated."""
        self.budget.was_good()
        self.state, self.stage, self.deadline = WorkerState.READY, "ready", math.inf

    def beat(self, load: Load, now: float) -> None:
        """Note a heartbeat, and its counters for the rates."""
        self.load = load
        self.num_beats += 1
        self._samples.append((now, load.prompt_tokens, load.generation_tokens))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_SPAN_S:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt and generation tokens per second over the last few seconds."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (t0, p0, g0), (t1, p1, g1) = self._samples[0], self._samples[-1]
        span = max(t1 - t0, 1e-9)
        return (p1 - p0) / span, (g1 - g0) / span

    @property
    def is_held(self) -> bool:
        """Whether this worker gets no new work, because it seems to hang."""
        return self.hang is not None or (self.watch is not None and self.watch.is_held)

    @property
    def doing(self) -> str:
        """The stage, and of a ready worker what seems wrong with it."""
        if self.hang is not None:
            return "hangs, about to be killed"
        return (self.watch.doubt if self.watch is not None else None) or self.stage

    def condemned(self, hang: Hang, text: str, lease: int | None, kill_at: float) -> None:
        """It hangs, with `lease` in admission: its stacks are asked for now, and it is killed at `kill_at`."""
        self.hang, self.hang_text, self.hang_lease, self.kill_at = hang, text, lease, kill_at

    def pardoned(self) -> None:
        """It does not hang."""
        self.hang, self.hang_text, self.hang_lease, self.kill_at = None, None, None, math.inf

    def died(self, last_exit: str, now: float, *, is_permanent: bool, is_charged: bool = True) -> None:
        """The process is gone: back off and start anew, or give this worker up."""
        self.pid, self.peer, self.last_exit, self.last_exit_at = None, None, last_exit, now
        self.capacity = self.prefetch = 0
        self.load = Load()
        self._samples.clear()
        self.deadline = math.inf
        self.watch = None
        if self.state is WorkerState.DRAINING:
            self.state = WorkerState.STOPPED
            return
        self.state = WorkerState.LOST
        wait_s = None if is_permanent else self.budget.spend(now, is_charged=is_charged)
        if wait_s is None:
            self.state, self.stage = WorkerState.FAILED, "failed"
            self.failure = self.failure or last_exit
        else:
            self.state, self.stage, self.start_at = WorkerState.BACKOFF, "restarting", now + wait_s


class Roster:
    """All slots, and what they mean for the pool."""

    def __init__(self, slots: list[Slot], min_ready: int) -> None:
        self.slots = slots
        self.min_ready = min_ready
        self.was_ready = False
        self.is_up = False

    def count(self, state: WorkerState) -> int:
        """How many workers are in `state`."""
        return sum(slot.state is state for slot in self.slots)

    def to_start(self, now: float, *, one_first: bool = False) -> list[Slot]:
        """Slots whose (re)start is due; with `one_first` the rest wait until a first worker was ready (cold caches)."""
        due = [slot for slot in self.slots if slot.state is WorkerState.BACKOFF and slot.start_at <= now]
        if one_first and not self.was_ready:
            busy = any(slot.state is WorkerState.STARTING for slot in self.slots)
            return [] if busy else due[:1]
        return due

    @property
    def usable(self) -> list[int]:
        """The workers that are not given up, those that are to come back included."""
        return [slot.index for slot in self.slots if slot.state is not WorkerState.FAILED]

    def overdue(self, now: float) -> list[Slot]:
        """Starting workers that were silent for longer than the start limit."""
        return [slot for slot in self.slots if slot.state is WorkerState.STARTING and slot.deadline <= now]

    def excuse(self, away_s: float) -> None:
        """The dispatcher was not there for so long: starting workers get it back."""
        for slot in self.slots:
            slot.deadline += away_s

    def settle(self) -> PoolState:
        """Where the pool stands now; STARTING until it is up for the first time."""
        ready, failed = self.count(WorkerState.READY), self.count(WorkerState.FAILED)
        self.was_ready = self.was_ready or ready > 0
        if failed == len(self.slots) or (not self.is_up and len(self.slots) - failed < self.min_ready):
            return PoolState.FAILED
        if ready + failed == len(self.slots):
            self.is_up = True
        if not self.is_up:
            return PoolState.STARTING
        return PoolState.READY if ready == len(self.slots) else PoolState.DEGRADED

    def reasons(self) -> str:
        """Why workers failed, one line each, equal reasons told once."""
        by_reason: dict[str, list[str]] = {}
        for slot in self.slots:
            if slot.state is WorkerState.FAILED and slot.failure:
                by_reason.setdefault(slot.failure, []).append(str(slot.index))
        return "\n".join(f"worker {', '.join(who)}: {reason}" for reason, who in by_reason.items())

    def why_incomplete(self) -> str:
        """What keeps workers from being ready: failures, and the deaths of those that are being started again."""
        coming = (WorkerState.LOST, WorkerState.BACKOFF, WorkerState.STARTING)
        died = [slot for slot in self.slots if slot.last_exit and slot.state in coming]
        lines = [f"worker {slot.index} is being started again: its last process {slot.last_exit}" for slot in died]
        if self.is_up and not self.count(WorkerState.READY):
            lines.insert(0, "no worker is ready, so items wait")
        return "\n".join([*lines, *filter(None, [self.reasons()])])

    def failure_text(self) -> str:
        """Why the pool can not go on: how many were needed, and each failed worker's reason."""
        ready = self.count(WorkerState.READY)
        head = "" if not ready else f"{ready} of {len(self.slots)} workers ready, {self.min_ready} needed (min_ready)\n"
        return head + self.reasons()


def failure_code(roster: Roster) -> ExitCode:
    """The exit code of a pool that has failed: 5 once it was up, else by what kept its workers from booting."""
    if roster.is_up:
        return ExitCode.ALL_WORKERS_FAILED
    kinds = {slot.failure_kind for slot in roster.slots if slot.state is WorkerState.FAILED}
    return FAILURE_EXITS.get(str(kinds.pop()), ExitCode.START_FAILED) if len(kinds) == 1 else ExitCode.START_FAILED

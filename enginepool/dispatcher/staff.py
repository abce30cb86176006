"""The staff: carries the roster's decisions out on processes and brings their exits back to the roster and the desk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Protocol

from enginepool.clock import monotonic
from enginepool.config import PoolSettings
from enginepool.dispatcher.back import Back
from enginepool.dispatcher.desk import Desk, Fate
from enginepool.dispatcher.log_lines import counted
from enginepool.dispatcher.observer import Observer
from enginepool.dispatcher.roster import Roster, Slot
from enginepool.dispatcher.supervisor import Exit, Supervisor, WorkerProcess
from enginepool.dispatcher.suspects import SIGKILLED, Death, cause_of
from enginepool.dispatcher.vigil import Hang
from enginepool.status import WorkerState

EXIT_GRACE_S = 0.02
RETRY_START_S = 2.0
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
SHOWN_TAIL_LINES = 15


class Host(Protocol):
    """What the staff needs of the dispatcher."""

    settings: PoolSettings
    observer: Observer

    def log(self, text: str, slot: Slot | None = None) -> None: ...
    def warn(self, text: str, slot: Slot | None = None) -> None: ...
    def show_worker_line(self, slot: Slot, text: str) -> None: ...
    def read_back_dry(self) -> None: ...


class Staff:
    """Starts, stops, kills and buries workers."""

    def __init__(
        self,
        host: Host,
        supervisor: Supervisor,
        roster: Roster,
        desk: Desk,
        back: Back,
        *,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._host = host
        self._supervisor = supervisor
        self._roster = roster
        self._desk = desk
        self._back = back
        self._watch = watch
        self._unwatch = unwatch
        self._exited: list[WorkerProcess] = []

    @property
    def has_exits(self) -> bool:
        """Whether a worker's exit was seen and waits to be judged."""
        return bool(self._exited)

    @property
    def is_empty(self) -> bool:
        """Whether no worker process is left."""
        return not self._supervisor.processes

    def tend(self, now: float, *, one_first: bool) -> None:
        """Start what is due, kill what has been silent for too long while starting, reap what was left to us."""
        self._supervisor.reap_strangers()
        for slot in self._roster.overdue(now):
            slot.failure = f"no sign of life for {self._host.settings.start_timeout_s:g} s while {slot.stage!r} (start_timeout_s)"
            self._supervisor.kill(slot.index)
            slot.deadline = float("inf")
        for slot in self._roster.to_start(now, one_first=one_first):
            self._start(slot, now)

    def ask_all_to_stop(self) -> None:
        """Ask ready and loading workers to go; one that has not even enrolled is killed, there is nothing to shut down."""
        for slot in self._roster.slots:
            if slot.pid is None:
                continue
            was_enrolled = slot.peer is not None
            slot.state = WorkerState.DRAINING
            if was_enrolled:
                self._back.stop(slot.index)
            else:
                self._supervisor.kill(slot.index)

    def kill_all(self) -> None:
        """SIGKILL every worker's group and reap it."""
        for index in list(self._supervisor.processes):
            self._supervisor.kill(index)
        for index in list(self._supervisor.processes):
            self._forget(self._supervisor.processes[index])
            self._supervisor.reap(index)
        self._exited.clear()

    def judge_exits(self, now: float) -> None:
        """Bury workers whose last messages have had time to arrive."""
        due = [process for process in self._exited if process.exited_at is not None and now - process.exited_at >= EXIT_GRACE_S]
        if due:
            self._host.read_back_dry()
        for process in due:
            self._exited.remove(process)
            self._bury(self._roster.slots[process.index], process, now)

    def wrong_mask(self, slot: Slot, wanted: set[int]) -> list[int]:
        """Where the worker's main thread may run, if that is not where it was planned; else empty."""
        mask = _mask_of(slot.pid) if slot.pid is not None else []
        return mask if set(mask) != wanted else []

    def _start(self, slot: Slot, now: float) -> None:
        try:
            process = self._supervisor.start(slot.index)
        except OSError as error:
            if not self._roster.was_ready:
                raise
            self._put_off(slot, error, now)
            return
        slot.started(process.pid, now, self._host.settings.start_timeout_s)
        self._watch(process.pidfd, lambda: self._on_exit(process))
        self._watch(process.log_fd, lambda: self._read_log(process))
        again = f" again (restart {slot.restarts})" if slot.restarts else ""
        self._host.observer.note(slot.index, "started", process.pid)
        self._host.log(f"started{again} on cpus {_mask_of(process.pid)}", slot)

    def _put_off(self, slot: Slot, error: OSError, now: float) -> None:
        """The process could not even be made: soon again while descriptors are short, else that is a failed start."""
        if error.errno in TRANSIENT:
            slot.start_at = now + RETRY_START_S
            self._host.warn(f"can't be started again now: {error.strerror}; the next try is in {RETRY_START_S:g} s", slot)
            return
        slot.failure = f"could not be started: {error}"
        slot.died(slot.failure, now, is_permanent=False)
        self._host.warn(f"worker {slot.index} could not be started: {error}; {_next_step(slot, now)}")

    def _on_exit(self, process: WorkerProcess) -> None:
        self._unwatch(process.pidfd)
        process.exited_at = monotonic()
        self._exited.append(process)

    def read_log_of(self, slot: Slot) -> None:
        """Show what the worker has printed so far."""
        process = self._supervisor.processes.get(slot.index)
        if process is not None and not process.has_log_ended:
            self._read_log(process)

    def _read_log(self, process: WorkerProcess) -> None:
        slot = self._roster.slots[process.index]
        for line in process.read_log():
            self._host.show_worker_line(slot, line)
        if process.has_log_ended:
            self._unwatch(process.log_fd)

    def _bury(self, slot: Slot, process: WorkerProcess, now: float) -> None:
        self._forget(process)
        ended = self._supervisor.reap(slot.index)
        how = _how_it_ended(slot, ended)
        was, pid = slot.state, slot.pid
        self._back.forget(slot)
        is_permanent = slot.failure_kind is not None and not self._roster.was_ready
        if slot.failure_kind is None:
            was_starting = slot.state is WorkerState.STARTING
            slot.failure = _explain(slot.failure or (f"{how} while {slot.stage!r}" if was_starting else how), ended.tail)
        self._host.observer.worker_died(slot.index, how, pid)
        fate = self._desk.worker_died(slot.index, _death(slot, ended, how), len(self._roster.usable))
        slot.died(how, now, is_permanent=is_permanent, is_charged=fate.is_charged)
        for index, was_charged in fate.explained:
            self._roster.slots[index].budget.refund(is_charged=was_charged)
        if was is not WorkerState.DRAINING:
            self._host.warn(f"worker {slot.index} (pid {pid}) {how}{_tell(fate)}; {_next_step(slot, now)}")

    def _forget(self, process: WorkerProcess) -> None:
        for fd in (process.pidfd, process.log_fd):
            self._unwatch(fd)


def _mask_of(pid: int) -> list[int]:
    """The CPUs the process may run on; empty when it has gone already."""
    try:
        return sorted(os.sched_getaffinity(pid))
    except OSError:
        return []


def _next_step(slot: Slot, now: float) -> str:
    if slot.state is WorkerState.FAILED:
        return "given up: it refused its start" if slot.failure_kind else "given up: max_restarts is spent, only a new pool brings it back"
    return f"restart in {slot.start_at - now:.1f} s" if slot.state is WorkerState.BACKOFF else slot.state.value


def _how_it_ended(slot: Slot, ended: Exit) -> str:
    if _hang_of(slot, ended) is not None:
        return f"was killed, for it {slot.hang_text}"
    if slot.failure is not None:  # its start was refused, or ended by us
        return f"{ended.how}: {slot.failure}"
    return f"{ended.how} after {slot.farewell}" if slot.farewell else ended.how


def _hang_of(slot: Slot, ended: Exit) -> Hang | None:
    """Why the dispatcher has killed it; a worker that was condemned may still have ended by itself."""
    return slot.hang if ended.code == SIGKILLED else None


def _death(slot: Slot, ended: Exit, how: str) -> Death:
    record, hang = ended.record, _hang_of(slot, ended)
    cause = cause_of(ended.code, hang, was_out_of_memory=ended.is_oom)
    if hang is not Hang.ADMIT:
        return Death(how, cause, record.admitting, record.fresh)
    if record.admitting != slot.hang_lease:  # it went on to another item in the last moment, which is not to blame
        return Death(how, cause, None, record.fresh)
    return Death(how, cause, record.admitting, record.fresh, hangs_in_admission=slot.watch is not None and slot.watch.lives)


def _tell(fate: Fate) -> str:
    parts = [
        f"{counted(fate.num_retried, 'item')} to run again elsewhere" if fate.num_retried else "",
        f"{counted(fate.num_apart, 'suspect')} to run apart" if fate.num_apart else "",
        f"{counted(fate.num_failed, 'item')} failed as worker_lost or timeout" if fate.num_failed else "",
    ]
    told = ", ".join(filter(None, parts))
    return f"; {told}" if told else ""


def _explain(what: str, tail: list[str]) -> str:
    lines = tail[-SHOWN_TAIL_LINES:]
    return what + ("; its last lines:\n  " + "\n  ".join(lines) if lines else "")

"""The supervisor: starts worker processes, watches them by pidfd, kills their groups and reaps them.

A worker leads its own process group, so that whatever it has started can be found; the group is killed before the
leader is reaped, while its number can not yet belong to anybody else. Its resource tracker is in another group: it ends by
itself when the others are gone, and removes the shared memory that they left. Should the dispatcher be killed, the kernel
kills the groups (lifeline.py).
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil

from enginepool import handover, lifeline
from enginepool.dispatcher.descriptors import restore_limit
from enginepool.dispatcher.logs import WorkerLog
from enginepool.dispatcher.oom import OomLedger, Verdict, find_counter
from enginepool.dispatcher.plan import WorkerPlan
from enginepool.dispatcher.scratch import make_scratch, remove_scratch
from enginepool.handover import WorkerSpec
from enginepool.recorder import FlightRecorder, Record

BY_US = "by the dispatcher"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
DUMP_SIGNAL = signal.SIGUSR1


class Exit(msgspec.Struct, frozen=True):
    """How a worker ended: its exit status (negative for a signal), in words, its last log lines and its flight record.

    `is_oom`: the kernel is known to have killed it for lack of memory.
    """

    code: int
    how: str
    tail: list[str]
    record: Record
    is_oom: bool


class WorkerProcess:
    """One started process of a worker slot."""

    def __init__(self, index: int, popen: subprocess.Popen[bytes], log_fd: int, scratch: Path, recorder: FlightRecorder) -> None:
        self.index = index
        self.popen = popen
        self.pid = popen.pid
        self.tie = lifeline.GroupTie(popen.pid)
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except BaseException:
            self.tie.close()
            raise
        self.log_fd = log_fd
        self.scratch = scratch
        self.recorder = recorder
        self.log = WorkerLog()
        self.exited_at: float | None = None
        self.has_log_ended = False
        self.was_killed_by_us = False

    def kill_group(self) -> None:
        """SIGKILL to the process, which for a moment of its start is in another group, and to its group."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """It is gone, and its group with it: let go of everything."""
        self.tie.close()
        os.close(self.log_fd)
        os.close(self.pidfd)

    def read_log(self) -> list[str]:
        """Lines that have come since the last call; never blocks."""
        lines: list[str] = []
        for _ in range(16):
            try:
                data = os.read(self.log_fd, 65536)
            except BlockingIOError:
                break
            if not data:
                self.has_log_ended = True
                break
            lines += self.log.feed(data)
        return lines


class Supervisor:
    """The worker processes of one pool, by slot index."""

    def __init__(self, plans: Mapping[int, WorkerPlan], make_spec: Callable[[int], WorkerSpec], *, is_chatty: bool) -> None:
        """Unless `is_chatty`, vLLM logs its warnings only (a VLLM_LOGGING_LEVEL of the user's wins)."""
        self._defaults = {} if is_chatty else {"VLLM_LOGGING_LEVEL": "WARNING"}
        self._plans = plans
        self._make_spec = make_spec
        self._oom = OomLedger(find_counter())
        self.processes: dict[int, WorkerProcess] = {}

    def start(self, index: int) -> WorkerProcess:
        """Start the process of a slot with its mask and environment in place before exec. Raises OSError."""
        try:
            return self._start(index)
        except subprocess.SubprocessError as error:  # what runs before exec has raised
            raise OSError(errno.EIO, str(error)) from error

    def _start(self, index: int) -> WorkerProcess:
        plan = self._plans[index]
        with ExitStack() as always, ExitStack() as undo:
            spec_fd = handover.put(self._make_spec(index))
            always.callback(os.close, spec_fd)
            scratch = make_scratch()
            undo.callback(remove_scratch, scratch)
            recorder = FlightRecorder.make()
            undo.callback(recorder.close)
            log_read, log_write = os.pipe2(os.O_CLOEXEC)
            always.callback(os.close, log_write)
            undo.callback(os.close, log_read)
            os.set_blocking(log_read, False)
            self._oom.started(index)
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "enginepool.worker.main", str(spec_fd), str(os.getpid()), str(recorder.fd)],
                stdin=subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                env=self._defaults | {"VLLM_RPC_BASE_PATH": str(scratch)} | child_environment(plan, os.environ),
                pass_fds=(spec_fd, recorder.fd),
                process_group=0,
                preexec_fn=_before_exec(plan.cpus, os.getpid()),
            )
            undo.callback(_undo_start, popen)
            process = self.processes[index] = WorkerProcess(index, popen, log_read, scratch, recorder)
            undo.pop_all()
        return process

    def kill(self, index: int) -> None:
        """SIGKILL the worker's whole group; the exit is then noticed like any other."""
        process = self.processes.get(index)
        if process is not None:
            process.was_killed_by_us = True
            process.kill_group()

    def read_record(self, index: int) -> Record:
        """What the worker's flight recorder says now."""
        process = self.processes.get(index)
        return Record() if process is None else process.recorder.read()

    def cpu_s(self, index: int) -> float:
        """Processor time that the worker's own process has used so far."""
        process = self.processes.get(index)
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split() if process else []
        except OSError:
            fields = []
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS if fields else 0.0

    def dump_stacks(self, index: int) -> int:
        """Ask the processes of the worker's group that know how for the stacks of all their threads; returns how many were asked."""
        process = self.processes.get(index)
        members = [] if process is None else [pid for pid in psutil.pids() if _is_member(pid, process.pid) and _catches_dump(pid)]
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
        return len(members)

    def reap(self, index: int) -> Exit:
        """Kill what is left of an exited worker's group, reap it; returns how it ended."""
        process = self.processes.pop(index)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        process.kill_group()
        process.read_log()
        process.log.finish()
        code = process.popen.wait()
        process.close()
        remove_scratch(process.scratch)
        record = process.recorder.read()
        process.recorder.close()
        verdict = self._judge(process, code)
        is_oom = verdict is not None and verdict.is_oom
        return Exit(code, describe_exit(code, verdict), list(process.log.tail), record, is_oom)

    def reap_strangers(self) -> None:
        """Reap what others have left to this process, as they do where it is process 1 of a container; workers keep."""
        mine = {process.pid for process in self.processes.values()}
        with suppress(ChildProcessError):
            while (seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and seen.si_pid not in mine:
                os.waitpid(seen.si_pid, 0)

    def _judge(self, process: WorkerProcess, code: int) -> Verdict | None:
        if code == -signal.SIGKILL and process.was_killed_by_us:
            return Verdict(False, BY_US)
        return self._oom.ended(process.index) if code else None


def _is_member(pid: int, pgid: int) -> bool:
    try:
        return os.getpgid(pid) == pgid
    except ProcessLookupError:
        return False


def _catches_dump(pid: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = status.partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (DUMP_SIGNAL - 1) & 1)


def _undo_start(popen: subprocess.Popen[bytes]) -> None:
    """End a process that can not be watched."""
    os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def child_environment(plan: WorkerPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: ours without what the plan removes, with what it sets."""
    kept = {name: value for name, value in environ.items() if name not in plan.env_unset}
    return kept | plan.env_set


def describe_exit(code: int, verdict: Verdict | None = None) -> str:
    """Exit status in words, with the likely cause of a signal."""
    if code == -signal.SIGKILL:
        return f"was killed by SIGKILL ({verdict.text})" if verdict else "was killed by SIGKILL"
    name = f"exited with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
    cause = " (a crash in native code)" if code == -signal.SIGSEGV else ""
    meanwhile = f"; meanwhile the kernel killed a process ({verdict.text})" if verdict and verdict.is_oom else ""
    return f"{name}{cause}{meanwhile}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _before_exec(cpus: tuple[int, ...], parent: int) -> Callable[[], None]:
    """Runs in the child between fork and exec; a mask that can't be set is told by comparing afterwards."""

    def prepare() -> None:
        lifeline.arm(parent)
        restore_limit()
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)

    return prepare

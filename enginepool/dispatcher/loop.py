"""The dispatcher: one single-threaded poll loop over the clients' socket, the workers' socket and the workers' processes.

::

                    ┌────────────── Dispatcher.run ──────────────┐
    clients ═ Front ┤ receive ─▶ Desk ─▶ assign ─▶ flush results ├ Back ═ workers
                    │     signals, exits, restarts, deadlines    │
                    └── Roster (decides) ── Supervisor (does) ───┘

Every turn reads the sockets before it judges anybody: a message that arrived before an exit counts, and a machine
that was paused kills nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from enginepool.clock import ClockAnchor, monotonic
from enginepool.config import PoolSettings
from enginepool.dispatcher.announce import Announcer
from enginepool.dispatcher.assign import BatchRule
from enginepool.dispatcher.back import Back
from enginepool.dispatcher.backlog import Backlog
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.doorkeeper import Doorkeeper
from enginepool.dispatcher.front import Front
from enginepool.dispatcher.logs import LogWriter
from enginepool.dispatcher.observer import Observer
from enginepool.dispatcher.plan import Plan
from enginepool.dispatcher.report import Reporter
from enginepool.dispatcher.roster import RestartBudget, Roster, Slot, failure_code
from enginepool.dispatcher.signals import Signals
from enginepool.dispatcher.staff import Staff
from enginepool.dispatcher.supervisor import OUT_OF_DESCRIPTORS, Supervisor
from enginepool.dispatcher.voice import Voice
from enginepool.dispatcher.warden import Warden
from enginepool.dispatcher.watches import Watches
from enginepool.errors import Code, ExitCode, ItemError
from enginepool.handover import EngineSpec, WorkerSpec
from enginepool.protocol import PROTOCOL_VERSION, Limits, Ready, Welcome
from enginepool.rundir import Claim
from enginepool.status import PoolState, PoolStatus, WorkerState
from enginepool.trace_file import TraceFile
from enginepool.transport import Router

SLOW_TURN_S = 0.25
FAST_TURN_S = 0.02
WARN_EVERY_S = 10.0
HEADER_BYTES = 1 << 20
DRY_TURNS = 64
MAX_UNSENT_MESSAGES = 16


class Dispatcher:
    """One pool from its first bind to its last reaped worker. `run` returns the exit code."""

    def __init__(
        self,
        settings: PoolSettings,
        plan: Plan,
        engine: Callable[[int], EngineSpec],
        claim: Claim,
        pool_id: str,
        model: str,
        announcer: Announcer,
        signals: Signals,
        log_writer: LogWriter,
        *,
        trace: TraceFile | None,
        one_first: bool,
        pid: int,
    ) -> None:
        self.settings = settings
        self.state = PoolState.STARTING
        self.reason: str | None = None
        self._pid = pid
        self._pool_id = pool_id
        self._model = model
        self._plan = plan
        self._engine = engine
        self._claim = claim
        self._announcer = announcer
        self._signals = signals
        self._log_writer = log_writer
        self._one_first = one_first
        self._exit_code: ExitCode | None = None
        self._stopping_code = ExitCode.OK
        self._drain_deadline = math.inf
        self._stop_deadline = math.inf
        self._slow_at = self._warn_at = 0.0
        self._watches = Watches()
        self._voice = Voice.of(settings, log_writer, pid)
        self.log, self.warn = self._voice.log, self._voice.warn
        self._anchor = ClockAnchor.take()
        self.observer = Observer(len(plan.workers), self._anchor, trace)
        front_router = Router(settings.max_frame_bytes + HEADER_BYTES, max_unsent_messages=MAX_UNSENT_MESSAGES, keys=claim.keys)
        back_router = Router(settings.max_frame_bytes + HEADER_BYTES, front_router)
        try:
            endpoint = front_router.bind(claim.endpoint)
            back_router.bind(claim.back)
            claim.publish(endpoint)
        except BaseException:
            back_router.close(0)
            front_router.close(0)
            raise
        self._wire(front_router, back_router, endpoint)

    def _wire(self, front_router: Router, back_router: Router, endpoint: str) -> None:
        settings = self.settings
        num = len(self._plan.workers)
        budget = (settings.max_restarts, settings.restart_window_s, settings.backoff_s)
        self.roster = Roster([Slot(index, RestartBudget(*budget)) for index in range(num)], settings.min_ready or num)
        limits = Limits(settings.max_frame_bytes, settings.max_items_per_message)
        about = (PROTOCOL_VERSION, self._pool_id, self._pid, self._model, endpoint)
        self._front = Front(
            front_router,
            Welcome(*about, limits, settings.submit_window, self._anchor, settings.client_silence_s),
            self._claim.client_secret,
            get_status=self.status,
            on_drain=self.drain,
            on_stop=self.stop,
            watch=self._watches.add,
            unwatch=self._watches.remove,
            warn=self.warn,
            max_output_bytes=settings.max_client_output_bytes,
        )
        self._back = Back(
            back_router, self.roster, self._pool_id, self._claim.secret, settings.start_timeout_s, self._on_ready, self._log_stage
        )
        timeout_s = settings.static_timeout_s
        rule = BatchRule(settings.batch_size, timeout_s) if settings.batch_size and timeout_s else None
        backlog = Backlog(settings.max_backlog_items, settings.max_backlog_bytes)
        deliver = self.observer.before(self._front.deliver)
        self._desk = Desk(backlog, settings.max_slice, rule, deliver, self._front.deliver_delta, self._back.abort)
        self._front.desk = self._back.desk = self._desk
        self._back.on_leased = self.observer.on_leased
        supervisor = Supervisor({plan.index: plan for plan in self._plan.workers}, self._make_spec, is_chatty=settings.log_level == "debug")
        self._staff = Staff(self, supervisor, self.roster, self._desk, self._back, watch=self._watches.add, unwatch=self._watches.remove)
        self._warden = Warden(self, supervisor, self.roster, self._desk)
        self._reporter = Reporter(self._pool_id, self._model, endpoint, self._anchor, list(self._plan.workers))
        self._watches.add_socket(front_router.socket, self._front.receive)
        self._watches.add_socket(back_router.socket, self._read_back)
        if front_router.door is not None:
            self._watches.add_socket(front_router.door.socket, Doorkeeper(front_router.door, self.warn).answer)
        for fd in self._signals.fds:
            self._watches.add(fd, self._on_signal)

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._claim.endpoint

    def run(self) -> ExitCode:
        """Serve until there is nothing left to do."""
        try:
            while self._exit_code is None:
                try:
                    self._turn()
                except OSError as error:
                    self._endure(error)
        finally:
            self._announcer.ready({"state": "failed", "error": "ended while starting", "exit_code": 130, "pid": self._pid})
            self._announcer.withdraw()
            self._staff.kill_all()
            self._front.flush()
            self._back.router.close(0)
            self._front.router.close()
            self.observer.close()
        return self._exit_code

    def show_worker_line(self, slot: Slot, text: str) -> None:
        """A line that a worker has printed; while it starts, a sign of life."""
        slot.progressed(monotonic(), self.settings.start_timeout_s)
        self._voice.worker_line(slot, text)

    def status(self) -> PoolStatus:
        """What `status` reports."""
        latency, num_dropped = self.observer.latency, self._log_writer.num_dropped
        front = self._front
        reason = self.roster.why_incomplete() or None if self.state in (PoolState.STARTING, PoolState.DEGRADED) else self.reason
        return self._reporter.status(self.state, reason, self.roster, self._desk, latency, front.num_clients, front.num_paused, num_dropped)

    def drain(self, limit_s: float | None = None) -> None:
        """Take nothing new, finish what there is, then stop; while starting there is nothing to finish.

        A later drain that names a limit may shorten the first one's, not lengthen it.
        """
        if self._is_stopping or (self.state is PoolState.DRAINING and limit_s is None):
            return
        limit_s = self.settings.drain_timeout_s if limit_s is None else limit_s
        counts = f"{len(self._desk.backlog)} waiting, {len(self._desk.leases)} in flight"
        self._drain_deadline = min(self._drain_deadline, monotonic() + limit_s)
        self.log(f"draining: {counts}, limit {self._drain_deadline - monotonic():.3g} s")
        self.state = PoolState.DRAINING
        self._announcer.withdraw()
        self._desk.is_draining = True
        self._slow_at = 0.0

    def stop(self, code: ExitCode = ExitCode.OK) -> None:
        """End what is left as retryable and ask the workers to go; those that do not are killed at one shared deadline."""
        if self._is_stopping:
            return
        self._stopping_code = code
        self._announcer.withdraw()
        self._desk.is_draining = True
        left = self._desk.close(ItemError(Code.DRAINING, "the pool stopped before this item finished; send it to the next one"))
        self.log(f"stopping{f': {left} unfinished items returned as retryable' if left else ''}")
        self._front.flush()
        self._front.say_farewell(code, left)
        self._stop_deadline = monotonic() + self.settings.shutdown_timeout_s
        self._staff.ask_all_to_stop()
        self._slow_at = 0.0

    def fail(self, reason: str, code: ExitCode) -> None:
        """The pool can not go on."""
        self.state, self.reason = PoolState.FAILED, reason
        self._voice.error(f"failed: {reason}")
        self._announcer.ready({"state": "failed", "error": reason, "exit_code": int(code), "pid": self._pid})
        self._announcer.withdraw()
        self._desk.is_draining = True
        self._desk.close(ItemError(Code.POOL_LOST, f"all workers failed: {reason}"))
        self._front.flush()
        self._staff.kill_all()
        self._exit_code = code

    @property
    def _is_stopping(self) -> bool:
        return self._stop_deadline != math.inf

    def _endure(self, error: OSError) -> None:
        """Whoever can reach a socket can use up our descriptors; who says nothing is soon cut off, and then it goes on."""
        if error.errno not in OUT_OF_DESCRIPTORS or not self.roster.was_ready:
            raise error
        if (now := monotonic()) >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            self.warn(f"{error.strerror}: new clients, restarts and status have to wait (raise the limit: LimitNOFILE, ulimit -n)")

    def _turn(self) -> None:
        self._watches.handle(self._timeout_ms())
        now = monotonic()
        self._desk.expire(now)
        if now >= self._slow_at or self._staff.has_exits:
            self._slow_turn(now)
        if not self._is_stopping:
            self._back.assign(now)
        self._front.flush()
        self._front.settle(now)
        self._back.router.flush(now)

    def _slow_turn(self, now: float) -> None:
        self._slow_at = now + SLOW_TURN_S
        self._log_writer.flush()
        self._front.drop_silent(now)
        self.observer.tick(now, len(self._desk.backlog), len(self._desk.leases))
        self._staff.judge_exits(now)
        if self._is_stopping:
            self._finish_stop(now)
            return
        self._warden.look(now)
        self._staff.tend(now, one_first=self._one_first)
        self._settle(now)

    def _settle(self, now: float) -> None:
        before, after = self.state, self.roster.settle()
        if after is PoolState.FAILED:
            self.fail(self.roster.failure_text(), failure_code(self.roster))
        elif self.state is PoolState.DRAINING:
            self._finish_drain(now)
        elif after is not before:
            self.state = after
            tell = self.log if after is PoolState.READY and before is PoolState.STARTING else self.warn
            where = f"; connect with Pool.connect({self.endpoint!r})" if before is PoolState.STARTING else ""
            tell(f"pool is {after.value}: {self.roster.count(WorkerState.READY)} of {len(self.roster.slots)} workers ready{where}")
            if self.roster.is_up:
                self._announcer.ready(self._reporter.ready_line(self.state))

    def _finish_drain(self, now: float) -> None:
        if not self.roster.is_up or self._desk.is_idle:
            self.stop()
        elif now >= self._drain_deadline:
            self.warn("drain limit reached")
            self.stop(ExitCode.DRAIN_LIMIT)

    def _finish_stop(self, now: float) -> None:
        if not self._staff.is_empty and now >= self._stop_deadline:
            self.warn("some workers did not stop in time; killing them")
            self._staff.kill_all()
        if self._staff.is_empty:
            self.state = PoolState.STOPPED
            self._announcer.ready({"state": "stopped", "error": "stopped while starting", "exit_code": 0, "pid": self._pid})
            self._exit_code = self._stopping_code
            self.log("stopped")

    def _on_ready(self, slot: Slot, ready: Ready) -> None:
        self._staff.read_log_of(slot)  # what it has printed until now belongs to its start
        wanted = set(self._plan.workers[slot.index].cpus)
        self.log(
            f"ready: {ready.model}, window {ready.max_num_seqs}, max_model_len {ready.max_model_len}, threads by cpus {ready.threads}",
            slot,
        )
        if mask := self._staff.wrong_mask(slot, wanted):
            self.warn(f"warning: the mask of cpus {sorted(wanted)} could not be set; it may run on {mask}", slot)
        self.observer.note(slot.index, "ready", slot.pid)
        self._announcer.stage(slot.index, "ready")
        self._slow_at = 0.0

    def _log_stage(self, slot: Slot, text: str) -> None:
        tell = self.warn if text.startswith("warning") else self.log
        tell(text, slot)
        self._announcer.stage(slot.index, text)

    def _on_signal(self) -> None:
        match self._signals.read():
            case "drain":
                self.drain()
            case "kill":
                self.warn("interrupted twice: killing the workers")
                self._staff.kill_all()
                self._exit_code = ExitCode.INTERRUPTED
            case "parent gone":
                self.log("the program that started this pool is gone, or ends it: stopping at once")
                self._staff.kill_all()
                self._exit_code = ExitCode.OK

    def _read_back(self) -> None:
        self._back.receive(monotonic())

    def read_back_dry(self) -> None:
        """Read what a worker sent before it died; others may send faster than anybody reads, so there is an end to it."""
        for _ in range(DRY_TURNS):
            if self._back.receive(monotonic()):
                return

    def _make_spec(self, index: int) -> WorkerSpec:
        return WorkerSpec(
            index=index,
            endpoint=self._claim.back,
            pool_id=self._pool_id,
            secret=self._claim.secret,
            engine=self._engine(index),
            is_static=self.settings.batch_size is not None,
            heartbeat_s=self.settings.heartbeat_s,
            max_frame_bytes=self.settings.max_frame_bytes,
            stall_timeout_s=self.settings.stall_timeout_s,
        )

    def _timeout_ms(self) -> int:
        now = monotonic()
        due = min(self._slow_at, self._desk.next_event())
        if self._staff.has_exits:
            due = min(due, now + FAST_TURN_S)
        due = min(due, self._front.router.retry_at, self._back.router.retry_at)
        return math.ceil(max(0.0, due - now) * 1000)

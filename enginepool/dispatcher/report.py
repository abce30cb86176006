"""Builds the PoolStatus struct from the roster, the desk and the processes."""

from __future__ import annotations

import math
import os

import psutil

from enginepool.clock import ClockAnchor
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.latency import LatencyWindow
from enginepool.dispatcher.plan import WorkerPlan
from enginepool.dispatcher.roster import Roster, Slot
from enginepool.status import PoolState, PoolStatus, WorkerStatus

MEMORY_AGE_S = 0.5


class Memory:
    """Resident memory of process trees, read anew every half second: for each reading the kernel lists every process there is."""

    def __init__(self) -> None:
        self._readings: dict[int, tuple[float, int | None]] = {}

    def of(self, pid: int | None, now: float) -> int | None:
        """Of a process and whatever it started (the engine core), pages they share counted in each."""
        if pid is None:
            return None
        read_at, num_bytes = self._readings.get(pid, (-math.inf, None))
        if now - read_at >= MEMORY_AGE_S:
            num_bytes = _tree_rss(pid)
            fresh = {other: reading for other, reading in self._readings.items() if now - reading[0] < 2 * MEMORY_AGE_S}
            self._readings = fresh | {pid: (now, num_bytes)}
        return num_bytes


class Reporter:
    """Knows what does not change and where to look for what does."""

    def __init__(self, pool_id: str, model: str, endpoint: str, anchor: ClockAnchor, plans: list[WorkerPlan]) -> None:
        self._pool_id = pool_id
        self._model = model
        self._endpoint = endpoint
        self._anchor = anchor
        self._plans = plans
        self._memory = Memory()

    def status(
        self,
        state: PoolState,
        reason: str | None,
        roster: Roster,
        desk: Desk,
        latency: LatencyWindow,
        num_clients: int,
        num_paused: int,
        dropped_log_lines: int,
    ) -> PoolStatus:
        """The pool as it stands now."""
        fresh = ClockAnchor.take(8)
        return PoolStatus(
            pool_id=self._pool_id,
            pid=os.getpid(),
            state=state,
            reason=reason,
            model=self._model,
            endpoint=self._endpoint,
            uptime_s=fresh.monotonic_s - self._anchor.monotonic_s,
            backlog=len(desk.backlog),
            backlog_bytes=desk.backlog.num_bytes,
            in_flight=len(desk.leases),
            finished=desk.num_finished,
            failed=desk.num_failed,
            aborted=desk.num_aborted,
            clients=num_clients,
            clock_drift_s=self._anchor.drift_s(fresh),
            rss_bytes=psutil.Process().memory_info().rss,
            dropped_log_lines=dropped_log_lines,
            workers=[self._worker(slot, desk, fresh.monotonic_s) for slot in roster.slots],
            latency=latency.summary(fresh.monotonic_s),
            paused_clients=num_paused,
        )

    def ready_line(self, state: PoolState) -> dict[str, object]:
        """What the ready descriptor tells once the pool is up."""
        return {
            "state": state.value,
            "endpoint": self._endpoint,
            "pid": os.getpid(),
            "pool_id": self._pool_id,
            "model": self._model,
            "plan": [
                {"worker": plan.index, "cpus": list(plan.cpus), "threads": plan.num_threads, "devices": list(plan.devices)}
                for plan in self._plans
            ],
        }

    def _worker(self, slot: Slot, desk: Desk, now: float) -> WorkerStatus:
        plan = self._plans[slot.index]
        prompt_rate, generation_rate = slot.rates()
        return WorkerStatus(
            index=slot.index,
            pid=slot.pid,
            state=slot.state,
            stage=slot.doing,
            in_flight=desk.leases.in_hand(slot.index),
            running=slot.load.running,
            waiting=slot.load.waiting,
            restarts=max(0, slot.restarts),
            last_exit=slot.last_exit,
            cpus=list(plan.cpus),
            devices=list(plan.devices),
            prompt_tokens=slot.load.prompt_tokens,
            generation_tokens=slot.load.generation_tokens,
            prompt_tokens_per_s=prompt_rate,
            generation_tokens_per_s=generation_rate,
            kv_cache_usage=slot.load.kv_cache_usage,
            rss_bytes=self._memory.of(slot.pid, now),
            iteration=slot.load.iteration,
            since_last_exit_s=None if slot.last_exit is None else now - slot.last_exit_at,
            window=slot.capacity + slot.prefetch,
        )


def _tree_rss(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        return sum(member.memory_info().rss for member in (process, *process.children(recursive=True))) or None
    except (psutil.Error, OSError):  # it has gone, or no descriptor is left to look with
        return None

"""Builds the PoolStatus struct from the roster, the desk and the processes."""

from __future__ import annotations

import os

import psutil

from enginepool.clock import ClockAnchor
from enginepool.dispatcher.desk import Desk
from enginepool.dispatcher.latency import LatencyWindow
from enginepool.dispatcher.plan import WorkerPlan
from enginepool.dispatcher.roster import Roster, Slot
from enginepool.status import PoolState, PoolStatus, WorkerStatus


class Reporter:
    """Knows what does not change and where to look for what does."""

    def __init__(self, pool_id: str, model: str, endpoint: str, anchor: ClockAnchor, plans: list[WorkerPlan]) -> None:
        self._pool_id = pool_id
        self._model = model
        self._endpoint = endpoint
        self._anchor = anchor
        self._plans = plans

    def status(
        self,
        state: PoolState,
        reason: str | None,
        roster: Roster,
        desk: Desk,
        latency: LatencyWindow,
        num_clients: int,
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
            stage=slot.stage,
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
            rss_bytes=_tree_rss(slot.pid),
            iteration=slot.load.iteration,
            since_last_exit_s=None if slot.last_exit is None else now - slot.last_exit_at,
        )


def _tree_rss(pid: int | None) -> int | None:
    """Resident memory of a worker and whatever it started (the engine core), pages they share counted in each."""
    try:
        process = psutil.Process(pid) if pid else None
        tree = [process, *process.children(recursive=True)] if process else []
        return sum(member.memory_info().rss for member in tree) or None
    except psutil.Error:
        return None

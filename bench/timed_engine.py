"""A `VllmEngine` in a process of its own, watched from outside: `timed_engine.py FD`, started by `Child` for `timings.py`.

The first message is the engine's spec, the answer "ready" comes when it is loaded. Each further message is the work of one
round, answered by one `Seen` an item.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import core_tap
import msgspec
from messages import Seen, Step
from mixed_work import Work

from enginepool import lifeline
from enginepool.clock import ClockAnchor, EngineStamps, monotonic
from enginepool.errors import ItemError
from enginepool.handover import EngineSpec
from enginepool.payload import GenerateRequest, OpenAIRequest, Request
from enginepool.worker.engine import Streamed

if __name__ == "__mp_main__":  # vLLM has spawned an engine core: the scheduler runs here
    lifeline.arm()
    core_tap.install(os.environ[core_tap.PATH_VARIABLE])


class Watched:
    """Runs rounds on a VllmEngine and notes wall clock and tokens around every step of the engine inside."""

    def __init__(self, spec: EngineSpec) -> None:
        from enginepool.worker.vllm_engine import VllmEngine

        self._engine = VllmEngine(spec, lambda text: None)
        self._step_inside = self._engine._engine.step
        self._engine._engine.step = self._step
        self._params = self._engine._params
        self._engine._params = self._streaming_params  # type: ignore[method-assign]
        self._first: dict[int, Step] = {}
        self._last: dict[int, Step] = {}
        self._metrics: dict[int, tuple[float, float]] = {}
        self._leases = 0

    def run(self, work: Work) -> list[Seen]:
        """Submit everything at once, step to the end."""
        anchor = ClockAnchor.take()
        for prompt, params in zip(work.prompts, work.params(), strict=True):
            self._leases += 1
            request = GenerateRequest(prompt, None, msgspec.Raw(msgspec.msgpack.encode(params)))
            self._engine.admit(self._leases, request, monotonic())
        seen: list[Seen] = []
        while self._engine.has_unfinished:
            for event in self._engine.step():
                if isinstance(event, Streamed):
                    continue  # what the step inside has returned was noted there
                if isinstance(event.result, ItemError):
                    raise RuntimeError(f"item {event.lease} failed: {event.result}")
                seen.append(self._see(event.lease, event.stamps, anchor))
        return seen

    def _see(self, lease: int, stamps: EngineStamps, anchor: ClockAnchor) -> Seen:
        arrival_s, queued_ts = self._metrics.pop(lease)
        reported = {name: getattr(stamps, name) for name in (*core_tap.MILESTONES, "finished")}
        ours = {name: anchor.wall_s + (stamp - anchor.monotonic_s) for name, stamp in reported.items()}
        by_arrival = {name: arrival_s + (reported[name] - queued_ts) for name in core_tap.MILESTONES}
        return Seen(lease, ours, by_arrival, self._first.pop(lease), self._last.pop(lease))

    def _step(self) -> Any:
        before = time.time()
        outputs = self._step_inside()
        step = Step(before, time.time())
        for output in outputs:
            lease = int(output.request_id)
            self._first.setdefault(lease, step)
            self._last[lease] = step
            self._metrics[lease] = (output.metrics.arrival_time, output.metrics.queued_ts)
        return outputs

    def _streaming_params(self, request: Request) -> Any:
        """An output at every step shows when the first token came; the engine's own params ask for the final one only."""
        from vllm.sampling_params import RequestOutputKind

        assert not isinstance(request, OpenAIRequest)
        params = self._params(request)
        params.output_kind = RequestOutputKind.CUMULATIVE
        return params


def main() -> None:
    """Serve until the parent is gone."""
    lifeline.arm()
    control = Connection(int(sys.argv[1]))
    spec: EngineSpec = control.recv()
    if spec.engine_core == "inproc":
        core_tap.install(os.environ[core_tap.PATH_VARIABLE])
    watched = Watched(spec)
    control.send("ready")
    while True:
        control.send(watched.run(control.recv()))


if __name__ == "__main__":
    main()

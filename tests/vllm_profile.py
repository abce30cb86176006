"""Run by tests in a process of its own: one worker's feeder on real vLLM under torch's profiler; tells scopes and step details as JSON."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence

import msgspec
import torch

from enginepool.handover import EngineSpec
from enginepool.payload import GenerateRequest, Request
from enginepool.protocol import Done, Drain, Message
from enginepool.recorder import FlightRecorder
from enginepool.status import Iteration
from enginepool.worker.feeder import Feeder, FeederLimits
from enginepool.worker.link import Batch, Command
from enginepool.worker.vllm_engine import VllmEngine

PARAMS = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 4, "ignore_eos": True}))


class Outlet:
    """Hands out one batch, then a drain; keeps what is sent, and the step details seen meanwhile."""

    def __init__(self, engine: VllmEngine) -> None:
        requests: list[Request | Exception] = [GenerateRequest("Hello there", None, PARAMS)] * 3
        self.commands: deque[Command] = deque([Batch([1, 2, 3], requests, 0.0), Drain()])
        self.num_done = 0
        self.details: list[Iteration] = []
        self._engine = engine

    def take(self, *, wait: bool) -> Command | None:
        details = self._engine.load().iteration
        if details is not None and details not in self.details:
            self.details.append(details)
        return self.commands.popleft() if self.commands else None

    def send(self, message: Message, payloads: Sequence[bytes] = ()) -> None:
        self.num_done += len(message.items) if isinstance(message, Done) else 0


def main() -> None:
    """Read the engine's spec from stdin."""
    engine = VllmEngine(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSpec), lambda _: None)
    outlet = Outlet(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        limits = FeederLimits(max_frame_bytes=1 << 20, stall_s=300.0)
        Feeder(engine, outlet, FlightRecorder.make(), limits, is_static=False).run()
    scopes = sorted(event.key for event in profile.key_averages() if event.key.startswith("enginepool"))
    print("\n" + json.dumps({"scopes": scopes, "num_done": outlet.num_done, "details": msgspec.to_builtins(outlet.details)}))


if __name__ == "__main__":
    main()

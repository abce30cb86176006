"""Independent stamps of what vLLM's scheduler does, taken with `time.time()` in the process where the engine core runs.

`install` wraps three methods of the scheduler; after each call a line with the wall clock goes to a file:

| call                  | sets                        | the stamp taken here                  |
| --------------------- | --------------------------- | ------------------------------------- |
| `add_request`         | `queued_ts`                 | when it returns                       |
| `schedule`            | `scheduled_ts`              | when it is entered                    |
| `update_from_output`  | `first_token_ts`, `last_token_ts` | when it returns: the tokens exist |
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any

PATH_VARIABLE = "BENCH_TAP"
MILESTONES = ("queued", "scheduled", "first_token", "last_token")


class Tap:
    """Writes one line a call: a kind, the wall clock, and the requests' names."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def note(self, kind: str, wall_s: float, names: list[str]) -> None:
        """Note one event; nothing is written for no requests."""
        if names:
            self._file.write(json.dumps([kind, wall_s, names]) + "\n")

    def install(self) -> None:
        """Wrap the scheduler's methods in this process."""
        from vllm.v1.core.sched.scheduler import Scheduler

        add, schedule, update = Scheduler.add_request, Scheduler.schedule, Scheduler.update_from_output

        def add_request(scheduler: Any, request: Any) -> None:
            add(scheduler, request)
            self.note("queued", time.time(), [request.request_id])

        def schedule_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            entered = time.time()
            output = schedule(scheduler, *args, **kwargs)
            self.note("scheduled", entered, [new.req_id for new in output.scheduled_new_reqs])
            return output

        def update_from_output(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = update(scheduler, *args, **kwargs)
            returned = time.time()
            items = [item for client in outputs.values() for item in client.outputs]
            self.note("tokens", returned, [item.request_id for item in items if item.new_token_ids])
            return outputs

        Scheduler.add_request, Scheduler.schedule, Scheduler.update_from_output = add_request, schedule_step, update_from_output


def install(path: str) -> None:
    """Install a tap that appends to this file, line by line."""
    Tap(open(path, "a", buffering=1)).install()  # noqa: SIM115


def read(path: Path) -> dict[str, dict[int, float]]:
    """For each milestone the stamp of each lease (vLLM's internal request id is the lease number and a suffix)."""
    stamps: dict[str, dict[int, float]] = {name: {} for name in MILESTONES}
    for line in path.read_text().splitlines():
        kind, wall_s, names = json.loads(line)
        for lease in (int(name.partition("-")[0]) for name in names):
            if kind == "tokens":
                stamps["first_token"].setdefault(lease, wall_s)
                stamps["last_token"][lease] = wall_s
            else:
                stamps[kind].setdefault(lease, wall_s)
    return stamps

"""The events of a Chrome trace file, and how the phases of a request look in it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

COLOURS = {"queued": "grey", "prefill": "thread_state_iowait", "decode": "thread_state_running", "lost": "terrible"}
MIN_DURATION_US = 1  # viewers draw a span without length inside its neighbour


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a trace file: X is a span, C a counter, i an instant, M a name. `ts` and `dur` are µs."""

    name: str
    ph: Literal["X", "C", "i", "M"]
    pid: int
    ts: int | None = None
    dur: int | None = None
    tid: int | None = None
    s: str | None = None
    cname: str | None = None
    args: dict[str, Any] | None = None

"""Tells a kill for lack of memory from a kill by somebody: the control group counts the processes that the kernel has killed.

The counter is `oom_kill` in `memory.oom_control` (v1) or `memory.events` (v2) of this process's own control group, which the
workers share; the root of v2 has none, there the machine's counter in `/proc/vmstat` stands for it. The kernel counts before it
sends the signal, so the counter has risen by the time an exit is seen.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from enginepool.dispatcher.cgroup import control_folders, read_memory_limit, read_text
from enginepool.dispatcher.kv_budget import format_bytes

_FILES = ("memory.oom_control", "memory.events")


class OomCounter(msgspec.Struct, frozen=True):
    """Where kills are counted, and the tightest memory limit that may cause them (None: only the machine's memory)."""

    path: Path
    limit_bytes: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    """What the counter says of one death; `is_oom` is true only on evidence. `text` stands in brackets behind a SIGKILL."""

    is_oom: bool
    text: str


UNKNOWN = Verdict(False, "out of memory? no oom_kill counter can be read here; see the kernel log")


def find_counter(root: Path = Path("/")) -> OomCounter | None:
    """The counter that a kill of this process's workers raises; None where none can be read."""
    folders = control_folders(root, "memory")
    limits = [limit for folder in folders if (limit := read_memory_limit(folder)) is not None]
    for path in (*(folders[0] / name for name in _FILES), root / "proc/vmstat"):
        if read_kills(path) is not None:
            return OomCounter(path, min(limits, default=None))
    return None


def read_kills(path: Path) -> int | None:
    """How many processes were killed for lack of memory so far."""
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdecimal():
            return int(value)
    return None


class OomLedger:
    """Compares the counter at a worker's death with that at its start; a rise that explained one death explains no other."""

    def __init__(self, counter: OomCounter | None) -> None:
        self._counter = counter
        self._at_start: dict[int, int] = {}
        self._explained = 0

    def started(self, index: int) -> None:
        """The worker is about to start."""
        self._at_start[index] = self._read() or 0

    def ended(self, index: int) -> Verdict:
        """Judge the death of a worker that was not asked to go."""
        now = self._read()
        if self._counter is None or now is None:
            return UNKNOWN
        before = max(self._at_start.get(index, 0), self._explained)
        if now <= before:
            return Verdict(False, f"by somebody, not for lack of memory: oom_kill is still {now}")
        self._explained = before + 1
        limit = "" if self._counter.limit_bytes is None else f"; the memory limit is {format_bytes(self._counter.limit_bytes)}"
        return Verdict(True, f"out of memory: oom_kill in {self._counter.path} rose from {before} to {now}{limit}")

    def _read(self) -> int | None:
        return None if self._counter is None else read_kills(self._counter.path)

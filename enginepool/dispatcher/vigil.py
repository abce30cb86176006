"""The vigil: tells a worker that hangs from one that is slow, by what it achieves and not by its being there.

Three limits: `mute` (no heartbeat, and no processor time used either: no thread of the process runs), `admit` (one admission
takes too long; `stall` does not count meanwhile) and `stall` (work in hand, but no tokens computed and no items finished). A
silent process that computes may have its interpreter held by native code, for a minute when vLLM 0.32 prepares a large schema;
it has until the stall limit.

All are measured on an awake clock, which stands still while the dispatcher itself does not run: a dispatcher or a machine
that was paused finds nobody guilty. Pure: time is an argument.
"""

from __future__ import annotations

import enum

import msgspec

from enginepool.recorder import Record

LONGEST_TURN_S = 1.0
HELD_ADMISSION_S = 2.0
HELD_SILENCE_S = 3.0
WORKING_SHARE = 0.1
TOLD_STALL_S = 5.0


class Limits(msgspec.Struct, frozen=True):
    """Seconds; see the settings of these names."""

    mute_s: float
    admit_s: float
    stall_s: float


class Hang(enum.Enum):
    """Which limit was passed."""

    MUTE = "mute"
    ADMIT = "admit"
    STALL = "stall"


class AwakeClock:
    """Seconds for which the dispatcher's loop has run. `away_s` is how much of the time since the last turn it was not there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.away_s = 0.0
        self._last: float | None = None

    def advance(self, now: float) -> float:
        """The loop has come round at `now` (monotonic); a longer absence than a turn can last counts as one turn."""
        passed_s = 0.0 if self._last is None else now - self._last
        self.away_s = max(0.0, passed_s - LONGEST_TURN_S)
        self.now += passed_s - self.away_s
        self._last = now
        return self.now


class Watch:
    """One ready worker process. All times are of the awake clock."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._beats = -1
        self._cpu_s = self._cpu_at_beat_s = 0.0
        self._record = Record()
        self._beat_at = self._admission_at = self._progress_at = now
        self._now = now

    def look(self, num_beats: int, record: Record, in_hand: int, cpu_s: float, now: float) -> Hang | None:
        """Take what the worker has achieved and the processor time it has used so far; returns the limit that it has passed."""
        before, self._record, self._now, self._cpu_s = self._record, record, now, cpu_s
        if num_beats != self._beats:
            self._excuse_pause()
            self._beats, self._beat_at, self._cpu_at_beat_s = num_beats, now, cpu_s
        if record.num_admissions != before.num_admissions:
            self._admission_at = now
        if not in_hand or (record.progress, record.num_admissions) != (before.progress, before.num_admissions):
            self._progress_at = now
        if self.silence_s >= self._limits.mute_s and not self._computes:
            return Hang.MUTE
        if record.admitting is not None:
            return Hang.ADMIT if self.admission_s >= self._limits.admit_s else None
        if self.silence_s >= max(self._limits.mute_s, self._limits.stall_s):
            return Hang.MUTE
        return Hang.STALL if self.stall_s >= self._limits.stall_s else None

    @property
    def silence_s(self) -> float:
        """How long no heartbeat came."""
        return self._now - self._beat_at

    @property
    def admission_s(self) -> float:
        """How long the admission that runs now has taken; 0 when none does."""
        return 0.0 if self._record.admitting is None else self._now - self._admission_at - self._pause_s

    @property
    def stall_s(self) -> float:
        """How long nothing was achieved with work in hand."""
        return self._now - self._progress_at

    def _excuse_pause(self) -> None:
        """A process that was stopped and goes on could achieve nothing meanwhile."""
        self._admission_at += self._pause_s
        self._progress_at += self._pause_s

    @property
    def _pause_s(self) -> float:
        """How long the process has been standing still now."""
        return self.silence_s if self.silence_s >= min(HELD_SILENCE_S, self._limits.mute_s) and not self._computes else 0.0

    @property
    def _computes(self) -> bool:
        """Whether the silent process uses the processor."""
        return self._cpu_s - self._cpu_at_beat_s > WORKING_SHARE * self.silence_s

    @property
    def is_held(self) -> bool:
        """Whether new work should rather go elsewhere, though no limit is passed yet."""
        return self.admission_s >= min(HELD_ADMISSION_S, self._limits.admit_s) or self.silence_s >= min(HELD_SILENCE_S, self._limits.mute_s)

    @property
    def doubt(self) -> str | None:
        """What `status` tells of a worker that achieves nothing, before any limit is passed; None when all is well."""
        if self.admission_s >= min(HELD_ADMISSION_S, self._limits.admit_s):
            return f"taking one item in for {self.admission_s:.0f} s"
        if self.silence_s >= min(HELD_SILENCE_S, self._limits.mute_s):
            return f"no heartbeat for {self.silence_s:.0f} s"
        return f"no progress for {self.stall_s:.0f} s" if self.stall_s >= TOLD_STALL_S else None

    @property
    def lives(self) -> bool:
        """Whether heartbeats come."""
        return self.silence_s < min(HELD_SILENCE_S, self._limits.mute_s)

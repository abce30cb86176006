"""Wall-clock stamps that can be trusted: one paired anchor for a whole pool, monotonic stamps everywhere else.

Every process stamps with CLOCK_MONOTONIC, which all processes of one Linux host share. The dispatcher pairs it once
with the wall clock; whoever shows a stamp converts it with that one pair, so order holds across processes and a step
of the wall clock can not make a duration negative.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

_FIRST_NAMESPACE = "time:[4026531834]"


def read_ahead_s(proc: Path = Path("/proc/self")) -> float:
    """How far this process's monotonic clock is ahead of the machine's, in seconds: a time namespace shifts it."""
    try:
        mine, of_children = ((proc / "ns" / name).readlink().name for name in ("time", "time_for_children"))
        if mine == _FIRST_NAMESPACE or mine != of_children:  # the file tells of the children's
            return 0.0
        lines = [line.split() for line in (proc / "timens_offsets").read_text().splitlines()]
        return next(int(seconds) + int(nanos) * 1e-9 for name, seconds, nanos in lines if name == "monotonic")
    except (OSError, ValueError, StopIteration):
        return 0.0


AHEAD_S = read_ahead_s()


def _of_the_machine() -> float:
    return time.monotonic() - AHEAD_S


monotonic = _of_the_machine if AHEAD_S else time.monotonic
"""The clock of every stamp on the wire, in seconds: CLOCK_MONOTONIC of the machine, which its time namespaces share."""


def from_raw(stamp: float) -> float | None:
    """What vLLM has read from this process's own clock, as a stamp on the wire; its 0.0 means that the milestone was not reached."""
    return stamp - AHEAD_S if stamp else None


class ClockAnchor(msgspec.Struct, frozen=True, array_like=True):
    """One moment on both clocks, and how far apart the two readings may lie (all in seconds)."""

    monotonic_s: float
    wall_s: float
    uncertainty_s: float

    @classmethod
    def take(cls, num_samples: int = 64) -> ClockAnchor:
        """Read monotonic–wall–monotonic `num_samples` times and keep the tightest triple."""
        best: ClockAnchor | None = None
        for _ in range(num_samples):
            before, wall, after = monotonic(), time.time(), monotonic()
            half = (after - before) / 2
            if best is None or half < best.uncertainty_s:
                best = cls(before + half, wall, half)
        assert best is not None
        return best

    def to_wall(self, monotonic_s: float | None) -> float | None:
        """Convert a monotonic stamp to Unix seconds; None stays None."""
        return None if monotonic_s is None else self.wall_s + (monotonic_s - self.monotonic_s)

    def own_to_wall(self, monotonic_s: float) -> float:
        """Convert a stamp of the process that reads this anchor; on one host that is the same clock."""
        return self.wall_s + (monotonic_s - self.monotonic_s)

    def seen_from(self, ahead_s: float, uncertainty_s: float) -> FarAnchor:
        """The same anchor for a reader on another machine, whose monotonic clock is `ahead_s` ahead."""
        return FarAnchor(self.monotonic_s, self.wall_s, max(self.uncertainty_s, uncertainty_s), ahead_s)

    def drift_s(self, other: ClockAnchor) -> float:
        """How far the wall clock has moved against the monotonic one between this anchor and `other`."""
        return (other.wall_s - self.wall_s) - (other.monotonic_s - self.monotonic_s)


class FarAnchor(ClockAnchor, frozen=True):
    """A pool's anchor as a client on another machine reads it. It never travels."""

    ahead_s: float

    def own_to_wall(self, monotonic_s: float) -> float:
        """Convert a stamp of the reader's own clock."""
        return self.wall_s + (monotonic_s - self.ahead_s - self.monotonic_s)


class EngineStamps(msgspec.Struct, frozen=True, array_like=True):
    """What a worker stamps for one item, in monotonic seconds; None where the milestone was not reached.

    `num_tokens` counts the tokens of the one sample that `first_token` and `last_token` belong to.
    """

    arrived: float | None = None
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_tokens: int = 0


encode_stamps = msgspec.msgpack.Encoder().encode
decode_stamps = msgspec.msgpack.Decoder(EngineStamps | None).decode


class Timings(msgspec.Struct, frozen=True):
    """When one item passed each milestone, in Unix seconds; None where it was not reached.

    `submitted` and `delivered` are taken by the client, `received` and `leased` by the dispatcher, `arrived` and
    `finished` by the worker; `queued`, `scheduled`, `first_token` and `last_token` are vLLM's `RequestStateStats`.
    All belong to the attempt that finished. `num_tokens` counts the tokens of the sample those stamps belong to.
    """

    submitted: float | None = None
    received: float | None = None
    leased: float | None = None
    arrived: float | None = None
    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    delivered: float | None = None
    num_tokens: int = 0

    @property
    def queue_s(self) -> float | None:
        """Seconds from `submitted` until the engine first scheduled it."""
        return _between(self.submitted, self.scheduled)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token as the caller sees it: `first_token` − `submitted`."""
        return _between(self.submitted, self.first_token)

    @property
    def engine_ttft_s(self) -> float | None:
        """Time to first token inside the worker: `first_token` − `arrived`."""
        return _between(self.arrived, self.first_token)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        span = _between(self.first_token, self.last_token)
        return None if span is None or self.num_tokens < 2 else span / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from `submitted` to `delivered`."""
        return _between(self.submitted, self.delivered)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start

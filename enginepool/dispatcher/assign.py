"""Which worker gets how many items next: the pull rule of continuous mode, the batch rule of static mode, and the place of suspects.

Pure: loads and times in, a decision out. The loop applies it and asks again until the answer is None.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker that may get work: its window (`capacity` running at once + `prefetch`) and the sequences in its hand."""

    index: int
    capacity: int
    prefetch: int
    in_hand: int
    is_isolating: bool = False

    @property
    def free(self) -> int:
        """How many more sequences it wants."""
        return 0 if self.is_isolating else max(0, self.capacity + self.prefetch - self.in_hand)

    @property
    def level(self) -> float:
        """How full it is, as a share of what it can run at once."""
        return self.in_hand / self.capacity


class Assignment(msgspec.Struct, frozen=True):
    """Give up to `num_sequences` to worker `index` in one message."""

    index: int
    num_sequences: int


def assign_slice(loads: list[WorkerLoad], waiting: int, max_slice: int) -> Assignment | None:
    """Continuous mode: fill the emptiest worker, no further than its equal share of what waits.

    The share keeps a short backlog level over the workers, so none prefetches what an idle one could run.
    """
    open_loads = [load for load in loads if load.free > 0]
    if not open_loads or waiting <= 0:
        return None
    emptiest = min(open_loads, key=lambda load: (load.level, load.index))
    share = -(-waiting // len(open_loads))
    running_slots = emptiest.capacity - emptiest.in_hand
    free = min(emptiest.free, running_slots) if running_slots > 0 else emptiest.free
    return Assignment(emptiest.index, max(1, min(max_slice, free, share)))


def trial_workers(usable: Collection[int], died_in: Collection[int]) -> set[int]:
    """Where suspects may run: not where they have died, unless no other worker is left."""
    return set(usable) - set(died_in) or set(usable)


def assign_trial(loads: list[WorkerLoad], allowed: Collection[int]) -> int | None:
    """The worker for suspects that run apart: an empty one of these, or None until there is one.

    At most half of the workers try suspects at a time, so that the others' work goes on.
    """
    if sum(load.is_isolating for load in loads) >= max(1, len(loads) // 2):
        return None
    return min((load.index for load in loads if load.in_hand == 0 and load.index in allowed), default=None)


def reserve_for_trial(loads: list[WorkerLoad], allowed: Collection[int]) -> int | None:
    """The worker that gets nothing new until it is empty, because suspects wait.

    None while one of these tries some already, or one is to come back: that one will be empty.
    """
    mine = [load for load in loads if load.index in allowed]
    if len(mine) < len(allowed) or any(load.is_isolating for load in loads):
        return None
    return min(mine, key=lambda load: (load.in_hand, load.index)).index


class BatchRule(msgspec.Struct, frozen=True):
    """Static mode: a full batch goes at once, a partial one `timeout_s` after its first item came."""

    size: int
    timeout_s: float

    def assign(self, loads: list[WorkerLoad], waiting: int, oldest: float | None, now: float, *, flush: bool) -> Assignment | None:
        """The next batch for an idle worker (one batch at a time per worker), or None. `flush` sends partial ones at once."""
        idle = next((load for load in loads if load.in_hand == 0), None)
        if idle is None or waiting <= 0 or oldest is None:
            return None
        if waiting >= self.size or flush or now >= oldest + self.timeout_s:
            return Assignment(idle.index, self.size)
        return None

    def next_deadline(self, oldest: float | None) -> float | None:
        """When a partial batch becomes due; None while nothing waits."""
        return None if oldest is None else oldest + self.timeout_s

"""Suspects: what a worker's death means for the items that it held, until the one that kills workers is told from its neighbours.

::

    first death                  all run again elsewhere, at once
    second death                 those that were there both times are suspects; they run by quarters, each in a worker of its own
    a quarter dies               its quarters are next
    a suspect dies alone         convicted once the evidence is enough, else alone once more
    died in an item's admission  only that item is suspected: it runs apart (after a death that looks like somebody's doing: at
                                 once elsewhere), and is convicted when it happens again

A killer in a hand of n costs 2 + ⌈log₄ n⌉ workers, one that kills in its admission costs 2. Innocent deaths count for nothing
unless they keep following the same item. Pure: the loop tells what has happened.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

import msgspec

from enginepool.dispatcher.backlog import Item
from enginepool.dispatcher.vigil import Hang

SUSPECT_AFTER_DEATHS = 2
QUARTERS = 4
CONVICTING_EVIDENCE = 5
EVIDENCE_OF_A_LONE_DEATH = 2
SIGKILLED = -9


class Cause(enum.IntEnum):
    """What a death looks like; the number is what it weighs against a suspect that ran apart from others.

    A plain SIGKILL or a silence of all threads is more often somebody's doing than an item's: it takes five, of others two.
    """

    OUTSIDE = 1
    INSIDE = 3


def cause_of(exit_code: int, hang: Hang | None, *, was_out_of_memory: bool = False) -> Cause:
    """What an exit status looks like; a hang has been ended by us, so its signal tells nothing."""
    if hang is not None:
        return Cause.OUTSIDE if hang is Hang.MUTE else Cause.INSIDE
    is_plain_kill = exit_code == SIGKILLED and not was_out_of_memory
    return Cause.OUTSIDE if is_plain_kill or exit_code == 0 else Cause.INSIDE


class Death(msgspec.Struct, frozen=True):
    """How a worker died, and what its flight recorder said: the lease in admission, the leases that no completed step has seen.

    `hangs_in_admission` says that the process lived on while the admission took longer than its limit.
    """

    how: str
    cause: Cause = Cause.INSIDE
    admitting: int | None = None
    fresh: Collection[int] = ()
    hangs_in_admission: bool = False


class Verdict:
    """Run again with others, run apart from others in these groups, or failed as the killer."""

    __slots__ = ("convicted", "groups", "retried")

    def __init__(self) -> None:
        self.retried: list[Item] = []
        self.groups: list[list[Item]] = []
        self.convicted: list[Item] = []


def judge(items: list[Item], worker: int, death: Death, *, is_trial: bool, num_workers: int) -> Verdict:
    """Decide about all that the dead worker held; `is_trial` says that these ran apart from others in it.

    `num_workers` is how many the pool has that are not given up: where there are others, an item is convicted only
    after it has died in two of them, so that a broken device convicts nobody.
    """
    verdict = Verdict()
    in_admission = next((item for item in items if item.lease == death.admitting), None) if death.admitting else None
    if in_admission is not None:
        _judge_admission(verdict, in_admission, worker, death, num_workers)
        rest = [item for item in items if item is not in_admission]
        if is_trial:
            verdict.groups += [rest] if rest else []
        else:
            verdict.retried += rest
        return verdict
    for item in items:
        item.deaths += 1
        item.died_in.append(worker)
        item.fresh_deaths += item.lease in death.fresh
        if is_trial:
            item.evidence += death.cause
        elif len(items) == 1:
            item.evidence += min(death.cause, EVIDENCE_OF_A_LONE_DEATH)
    if len(items) == 1 and items[0].deaths >= SUSPECT_AFTER_DEATHS:
        _judge_alone(verdict, items[0], num_workers)
    elif is_trial:
        verdict.groups += quarters(items)
    else:
        suspects = _suspects(items)
        apart = set(suspects)
        verdict.retried += [item for item in items if item not in apart]
        verdict.groups += quarters(suspects)
    return verdict


def quarters(items: list[Item]) -> list[list[Item]]:
    """At most four groups, of nearly the same size, in order."""
    size = -(-len(items) // QUARTERS)
    return [items[start : start + size] for start in range(0, len(items), size)] if items else []


def _judge_admission(verdict: Verdict, item: Item, worker: int, death: Death, num_workers: int) -> None:
    item.deaths += 1
    item.admission_deaths += 1
    item.died_in.append(worker)
    if death.hangs_in_admission or (item.admission_deaths >= SUSPECT_AFTER_DEATHS and _is_elsewhere_too(item, num_workers)):
        verdict.convicted.append(item)
    elif death.cause is Cause.OUTSIDE:
        verdict.retried.append(item)
    else:
        verdict.groups.append([item])


def _judge_alone(verdict: Verdict, item: Item, num_workers: int) -> None:
    if item.evidence >= CONVICTING_EVIDENCE and _is_elsewhere_too(item, num_workers):
        verdict.convicted.append(item)
    else:
        verdict.groups.append([item])


def _is_elsewhere_too(item: Item, num_workers: int) -> bool:
    return len(set(item.died_in)) >= min(2, num_workers)


def _suspects(items: list[Item]) -> list[Item]:
    """Those of several deaths; of two deaths rather those that the engine had just taken in both times."""
    repeated = [item for item in items if item.deaths >= SUSPECT_AFTER_DEATHS]
    newcomers = {item for item in repeated if item.fresh_deaths == item.deaths}
    return [item for item in repeated if item in newcomers or item.deaths > SUSPECT_AFTER_DEATHS] if newcomers else repeated

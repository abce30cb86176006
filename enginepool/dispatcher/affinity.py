"""Decide which cores each worker gets and how many threads they carry; pure.

| `cpu_affinity` | cores of a worker                                                                   |
| -------------- | ----------------------------------------------------------------------------------- |
| `auto`         | CPU engine: its own part of the allowed cores; GPU: the node of its GPU; echo: all   |
| `reset`        | all allowed cores: the cgroup's cpuset, whatever mask was inherited                  |
| `inherit`      | the inherited mask, kept on purpose                                                  |
| a list         | the cores named, one group for all workers or one for each                           |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from enginepool.dispatcher.cpuset import format_cpus, parse_groups
from enginepool.dispatcher.machine import Machine
from enginepool.dispatcher.plan import CoreShare, Device, PlacementRequest
from enginepool.dispatcher.spread import spread
from enginepool.errors import SettingsError

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
Cpus = tuple[int, ...]


class CorePlan(msgspec.Struct, frozen=True):
    """One share of the cores per worker, where they came from in words, and what to warn about."""

    shares: tuple[CoreShare, ...]
    origin: str
    warnings: tuple[str, ...]


def plan_cores(machine: Machine, request: PlacementRequest, workers: int, devices: Sequence[Device]) -> CorePlan:
    """Choose the cores of every worker.

    Raises SettingsError for a core list (of `cpu_affinity` or, under `auto` on CPU, of `VLLM_CPU_OMP_THREADS_BIND`) that
    can't be read, names cores that aren't allowed, or has the wrong number of groups.
    """
    allowed, origin, warnings = _allowed_cpus(machine)
    if stated := _stated_list(request, devices):
        name, text = stated
        shares = _listed(machine, request.ranks, workers, allowed, name, text)
        origin = f"{name} {text!r}"
    elif request.cpu_affinity == "inherit":
        kept = tuple(cpu for cpu in machine.inherited_cpus if cpu in allowed) or machine.inherited_cpus
        shares = _shared(machine, request.ranks, workers, kept)
        origin, warnings = f"inherited mask {format_cpus(kept)}", ()
    elif request.cpu_affinity == "auto" and request.engine == "vllm":
        shares = _automatic(machine, request.ranks, workers, allowed, devices)
        origin += ", the node of each worker's first GPU" if devices else ", divided among the workers"
    else:
        shares = _shared(machine, request.ranks, workers, allowed)
    return CorePlan(shares, origin, warnings + _crowding(machine, request, shares))


def count_threads(shares: Sequence[CoreShare], cpu_quota: float | None) -> tuple[int, ...]:
    """How many computing threads each worker gets: its cores, less what it shares with others, within its part of the quota.

    A core used by three workers counts a third for each, because thread pools that each fill all cores stall each other.
    Never less than 1.
    """
    users = Counter(cpu for share in shares for cpu in share.cpus)
    fair = [sum(Fraction(1, users[cpu]) for cpu in share.cpus) for share in shares]
    cap = None if cpu_quota is None else int(cpu_quota / len(shares))
    return tuple(max(1, int(cores) if cap is None else min(int(cores), cap)) for cores in fair)


def _allowed_cpus(machine: Machine) -> tuple[Cpus, str, tuple[str, ...]]:
    online = machine.online_cpus or machine.inherited_cpus
    if machine.cpuset is not None:
        allowed = tuple(cpu for cpu in machine.cpuset if cpu in online) or machine.cpuset
        return allowed, f"cgroup cpuset {format_cpus(allowed)}{_undone(machine, allowed)}", ()
    undone = _undone(machine, online)
    unsure = (
        f"the cgroup's cpuset can't be read, so all online cores {format_cpus(online)} count as allowed; "
        "if fewer are, set cpu_affinity to 'inherit' or to a list"
    )
    return online, f"online cores {format_cpus(online)}, no cgroup cpuset{undone}", (unsure,) if undone else ()


def _undone(machine: Machine, allowed: Cpus) -> str:
    """Words for a mask that is widened; empty if there is nothing to widen."""
    mask = machine.inherited_cpus
    return "" if set(mask) >= set(allowed) else f", reset from inherited mask {format_cpus(mask)}"


def _stated_list(request: PlacementRequest, devices: Sequence[Device]) -> tuple[str, str] | None:
    """The core list somebody wrote and the name of the setting it stands in."""
    if request.cpu_affinity not in ("auto", "reset", "inherit"):
        return "cpu_affinity", request.cpu_affinity
    bind = request.environ.get(BIND_VARIABLE, "").strip()
    # The variable is meant for CPU engines only, and its words say "no list".
    if request.cpu_affinity != "auto" or request.engine != "vllm" or devices or bind in ("", "auto", "nobind"):
        return None
    return BIND_VARIABLE, bind


def _listed(machine: Machine, ranks: int, workers: int, allowed: Cpus, name: str, text: str) -> tuple[CoreShare, ...]:
    groups = _parse(name, text)
    outside = sorted({cpu for group in groups for cpu in group} - set(allowed))
    if outside:
        raise SettingsError(
            f"{name} is {text!r}: cores {format_cpus(outside)} are not allowed here, only {format_cpus(allowed)}; "
            "name allowed cores or use 'auto'"
        )
    if len(groups) == 1:
        return _shared(machine, ranks, workers, groups[0])
    if len(groups) == workers:
        return tuple(CoreShare(group, spread(machine, group, ranks)) for group in groups)
    # vLLM's own meaning with several ranks: one group for each of them.
    if len(groups) == workers * ranks:
        parts = [groups[index * ranks : (index + 1) * ranks] for index in range(workers)]
        return tuple(CoreShare(tuple(sorted(set().union(*part))), part) for part in parts)
    raise SettingsError(
        f"{name} is {text!r}: {len(groups)} groups of cores for {workers} worker{'s' * (workers > 1)}; "
        f"give one group for all or {workers} separated by '|'"
    )


def _parse(name: str, text: str) -> tuple[Cpus, ...]:
    try:
        return parse_groups(text)
    except ValueError as error:
        words = "'auto', 'reset', 'inherit'" if name == "cpu_affinity" else "'auto', 'nobind'"
        raise SettingsError(f"{name} is {text!r}: {error}; use {words} or a list such as '0-3' or '0-3|4-7'") from error


def _shared(machine: Machine, ranks: int, workers: int, cpus: Cpus) -> tuple[CoreShare, ...]:
    return (CoreShare(cpus, spread(machine, cpus, ranks)),) * workers


def _automatic(machine: Machine, ranks: int, workers: int, allowed: Cpus, devices: Sequence[Device]) -> tuple[CoreShare, ...]:
    if devices:
        parts = tuple(_near(machine, allowed, devices[index * ranks].numa_node) for index in range(workers))
    else:
        parts = spread(machine, allowed, workers)
    return tuple(CoreShare(part, spread(machine, part, ranks)) for part in parts)


def _near(machine: Machine, allowed: Cpus, node_id: int | None) -> Cpus:
    local = {cpu for node in machine.nodes if node.id == node_id for cpu in node.cpus}
    return tuple(cpu for cpu in allowed if cpu in local) or allowed


def _crowding(machine: Machine, request: PlacementRequest, shares: Sequence[CoreShare]) -> tuple[str, ...]:
    if request.engine == "echo":
        return ()
    num_cores = len({cpu for share in shares for cpu in share.cpus})
    if len(shares) > num_cores:
        return (f"{len(shares)} workers share {num_cores} core{'s' * (num_cores > 1)}; fewer workers would be faster",)
    if machine.cpu_quota is not None and machine.cpu_quota < len(shares):
        return (
            f"{len(shares)} workers share a CPU quota of {machine.cpu_quota:g} cores and will be throttled; use fewer or raise the quota",
        )
    return ()

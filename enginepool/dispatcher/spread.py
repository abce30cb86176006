"""Divide cores among workers, whole NUMA nodes first and whole physical cores next; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from enginepool.dispatcher.machine import Machine, NumaNode

T = TypeVar("T")
Cpus = tuple[int, ...]


def spread(machine: Machine, cpus: Cpus, count: int) -> tuple[Cpus, ...]:
    """Give each of `count` takers a part of `cpus`; the parts are disjoint unless there are more takers than cores.

    With no more takers than NUMA nodes each gets whole nodes; otherwise each node's cores are divided, and hyperthreads of
    one physical core stay together where the numbers allow. More takers than cores share them round-robin.
    """
    if count > len(cpus):
        return tuple((cpus[index % len(cpus)],) for index in range(count))
    groups = group_by_node(machine.nodes, cpus)
    if count <= len(groups):
        return tuple(_merge(part) for part in _chunks(groups, count))
    takers = _takers_per_group([len(group) for group in groups], count)
    return tuple(part for group, number in zip(groups, takers, strict=True) for part in _divide(machine.cores, group, number))


def group_by_node(nodes: Sequence[NumaNode], cpus: Cpus) -> list[Cpus]:
    """The given cores node by node; cores that no node claims form the last group."""
    groups = [tuple(cpu for cpu in cpus if cpu in node.cpus) for node in nodes]
    claimed = set(_merge(groups))
    groups.append(tuple(cpu for cpu in cpus if cpu not in claimed))
    return [group for group in groups if group]


def find_node(nodes: Sequence[NumaNode], cpus: Cpus) -> NumaNode | None:
    """The one node that holds all these cores; None if there is no such node."""
    return next((node for node in nodes if cpus and set(cpus) <= set(node.cpus)), None)


def _takers_per_group(sizes: Sequence[int], count: int) -> list[int]:
    # One each first, then always to whoever has most cores per taker: uneven nodes get uneven numbers.
    takers = [1] * len(sizes)
    for _ in range(count - len(sizes)):
        roomiest = max(range(len(sizes)), key=lambda index: sizes[index] / (takers[index] + 1))
        takers[roomiest] += 1
    return takers


def _divide(cores: Sequence[Cpus], cpus: Cpus, count: int) -> list[Cpus]:
    claimed = {cpu for core in cores for cpu in core}
    units = [part for core in cores if (part := tuple(cpu for cpu in core if cpu in cpus))]
    units += [(cpu,) for cpu in cpus if cpu not in claimed]
    # Two workers on the halves of one physical core are still better than one worker without a core.
    if len(units) < count:
        units = [(cpu,) for cpu in cpus]
    return [_merge(part) for part in _chunks(sorted(units), count)]


def _chunks(items: Sequence[T], count: int) -> list[Sequence[T]]:
    return [items[len(items) * index // count : len(items) * (index + 1) // count] for index in range(count)]


def _merge(groups: Iterable[Cpus]) -> Cpus:
    return tuple(sorted({cpu for group in groups for cpu in group}))

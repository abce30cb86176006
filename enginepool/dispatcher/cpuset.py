"""Read and write lists of cores as the kernel and vLLM spell them (`0-3,8`, groups split by `|`); pure."""

from __future__ import annotations

from collections.abc import Iterable

# The kernel is built for 8192 at most; the bound keeps a typing error like 0-99999999999 from filling the memory.
MAX_CPU = 65535


def parse_cpus(text: str) -> tuple[int, ...]:
    """Turn `"5,2-4"` into `(2, 3, 4, 5)`; an empty text gives `()`.

    Raises ValueError naming the part that isn't a core or a range.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        cpus.update(_parse_part(part.strip()))
    return tuple(sorted(cpus))


def parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Turn `"0-3|4-7"` into one tuple of cores per group (the syntax of `VLLM_CPU_OMP_THREADS_BIND`).

    Raises ValueError naming the bad part; a group without cores is bad too.
    """
    groups = tuple(parse_cpus(part) for part in text.split("|"))
    if not all(groups):
        raise ValueError(f"group {groups.index(())} is empty")
    return groups


def format_cpus(cpus: Iterable[int]) -> str:
    """Turn `(0, 1, 2, 8)` into `"0-2,8"`; no cores give an empty text."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in _runs(cpus))


def format_groups(groups: Iterable[Iterable[int]]) -> str:
    """The opposite of `parse_groups`."""
    return "|".join(format_cpus(group) for group in groups)


def _parse_part(part: str) -> range:
    low, dash, high = part.partition("-")
    first = _parse_cpu(low, part)
    last = _parse_cpu(high, part) if dash else first
    if last < first:
        raise ValueError(f"{part!r} runs backwards")
    return range(first, last + 1)


def _parse_cpu(text: str, part: str) -> int:
    # int() alone would take "+1", "1_0" and digits of other scripts.
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 6 and int(digits) <= MAX_CPU):
        raise ValueError(f"{part!r} is not a core or a range of cores")
    return int(digits)


def _runs(cpus: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], cpu)
        else:
            runs.append((cpu, cpu))
    return runs

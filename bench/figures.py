"""Medians, percentiles, markdown tables and verdicts: how every benchmark here shows its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["at_least", "at_most", "median", "percentile", "print_table", "spread"]


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: always one of the values."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`lowest–highest` of the rounds, and their distance as a share of the median."""
    low, high = min(values), max(values)
    return f"{low:,.{digits}f}–{high:,.{digits}f} ({(high - low) / median(values):.0%})"


def at_most(value: float, limit: float, unit: str = "") -> str:
    """The verdict on a value that must not exceed a limit."""
    return f"≤ {limit:g}{unit}: {'met' if value <= limit else 'missed'}"


def at_least(value: float, limit: float, unit: str = "") -> str:
    """The verdict on a value that must reach a limit."""
    return f"≥ {limit:g}{unit}: {'met' if value >= limit else 'missed'}"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a markdown table; the first and the last column are text, the others numbers."""
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    marks = ["-" * width if column in (0, len(widths) - 1) else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    for row in [headers, marks, *rows]:
        print(f"| {' | '.join(_cell(text, widths, column) for column, text in enumerate(row))} |")
    print(flush=True)


def _cell(text: str, widths: Sequence[int], column: int) -> str:
    return text.ljust(widths[column]) if column in (0, len(widths) - 1) else text.rjust(widths[column])

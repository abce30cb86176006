"""A table that fits: the least important columns go first when the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2


class Column(NamedTuple):
    """One column: `rank` 0 is never dropped, the highest goes first."""

    title: str
    rank: int
    cells: Sequence[Text | str]
    is_left: bool = False

    @property
    def width(self) -> int:
        """Cells that the widest entry takes."""
        return max(map(_length, (self.title, *self.cells)))


def lay_out(columns: Sequence[Column], width: int) -> list[Text]:
    """The head and one line a row, at most `width` wide where dropping columns can bring that about."""
    kept = _fit([column for column in columns if column.cells], width)
    rows = [[column.title for column in kept], *zip(*(column.cells for column in kept), strict=True)]
    lines = [_line(row, kept) for row in rows]
    lines[0].stylize("dim")
    return lines


def pack(parts: Sequence[Text], width: int, gap: int = 3) -> list[Text]:
    """Short pieces side by side, on as many lines as they need."""
    from rich.text import Text

    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + gap + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], " " * gap, part)
        else:
            lines.append(part)
    return lines


def _fit(columns: list[Column], width: int) -> list[Column]:
    kept = list(columns)
    while sum(column.width for column in kept) + GAP * (len(kept) - 1) > width:
        least = max(kept, key=lambda column: column.rank)
        if least.rank == 0:
            break
        kept.remove(least)
    return kept


def _line(row: Sequence[Text | str], columns: list[Column]) -> Text:
    from rich.text import Text

    parts: list[Text | str] = []
    for position, (cell, column) in enumerate(zip(row, columns, strict=True)):
        pad = " " * (column.width - _length(cell))
        is_last = position == len(columns) - 1
        parts += [" " * GAP if position else "", *([cell, "" if is_last else pad] if column.is_left else [pad, cell])]
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _length(cell: Text | str) -> int:
    from rich.cells import cell_len

    return cell_len(cell) if isinstance(cell, str) else cell.cell_len

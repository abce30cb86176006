"""Ordered runs that are continued: earlier results wait in a file of their own until their turn comes."""

from __future__ import annotations

import os
from pathlib import Path

from enginepool.batch.earlier import Result, read_results
from enginepool.batch.journal import sync_folder


def merged_path(out: Path) -> Path:
    """Where an ordered run keeps earlier results until they have been merged."""
    return out.with_name(f"{out.name}.earlier")


class Earlier:
    """Reads earlier results in the order of the input, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results = read_results(path)
        self._next: Result | None = None

    def take(self, number: int) -> bytes | None:
        """The result of a line, or None; lines are asked for in rising order."""
        while self._next is None or self._next.number < number:
            self._next = next(self._results, None)
            if self._next is None:
                return None
        return self._next.data if self._next.number == number else None

    def remove(self) -> None:
        """All of them have been written again."""
        self._results.close()  # type: ignore[attr-defined]
        self.path.unlink(missing_ok=True)


def gather(out: Path, merged: Path, *, drop_failed: bool) -> None:
    """Move all results to `merged`, in order, and empty `out`; safe to be cut off anywhere.

    `out` holds the first lines of the input, `merged` (from a run that was cut off while it merged) those after them too.
    """
    draft = merged.with_name(f"{merged.name}.draft")
    last = 0
    with draft.open("wb") as file:
        for path in (out, merged):
            for result in read_results(path):
                if result.number > last:
                    last = result.number
                    if not (drop_failed and result.is_failed):
                        file.write(result.data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(merged)
    sync_folder(merged.parent)
    with out.open("r+b") as file:
        file.truncate(0)
        os.fsync(file.fileno())

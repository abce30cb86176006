"""Ordered runs that are continued: earlier results wait in a file of their own until their turn comes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from enginepool.batch.earlier import DRAFT, Result, read_results
from enginepool.batch.journal import sync_folder

ROWS = "CREATE TABLE places (line INTEGER PRIMARY KEY, which INTEGER, place INTEGER, size INTEGER, failed INTEGER)"


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
    """Move all results to `merged`, in the order of the input, and empty `out`; safe to be cut off anywhere.

    The two may hold the same results (a run that was cut off while it merged), and in any order (it was not an ordered one).
    """
    draft = merged.with_name(f"{merged.name}.{DRAFT}")
    with Places((out, merged)) as places, draft.open("wb") as file:
        for data in places.results(drop_failed=drop_failed):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(merged)
    sync_folder(merged.parent)
    with out.open("ab") as file:
        file.truncate(0)
        os.fsync(file.fileno())


class Places:
    """Where the result of each line stands, in a temporary database; of two for a line the first counts."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._base = sqlite3.connect("")
        self._base.executescript(f"PRAGMA journal_mode=OFF; {ROWS};")
        for which, path in enumerate(paths):
            self._base.executemany("INSERT OR IGNORE INTO places VALUES (?, ?, ?, ?, ?)", _places(which, path))

    def results(self, *, drop_failed: bool) -> Iterator[bytes]:
        """The results in the order of the input."""
        with ExitStack() as stack:
            fds = [stack.enter_context(path.open("rb")).fileno() if path.exists() else -1 for path in self._paths]
            for which, place, size, is_failed in self._base.execute("SELECT which, place, size, failed FROM places ORDER BY line"):
                if not (drop_failed and is_failed):
                    yield os.pread(fds[which], size, place)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()


def _places(which: int, path: Path) -> Iterator[tuple[int, int, int, int, bool]]:
    place = 0
    for result in read_results(path):
        yield result.number, which, place, len(result.data), result.is_failed
        place += len(result.data)

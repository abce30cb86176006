"""Carries results over to an input that has changed: those of lines that are still in it, wherever they stand there now.

First the kept results are written beside the outputs, then the new journal, then they take the outputs' places. A run that
was cut off in between finds a journal whose results still wait beside (`finish_carrying`), or the old one, and nothing has changed.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgspec

from enginepool.batch.earlier import Result, copy_kept, take_place
from enginepool.batch.index import DIGEST_BYTES, Index
from enginepool.batch.journal import Header, Journal, index_digests
from enginepool.batch.merge import merged_path


def carry_over(journal: Journal, fresh: Header, index: Index, outputs: list[Path], *, in_place: bool) -> Journal:
    """Keep what still fits; with `in_place` only where the line stands where it stood (an ordered output can't be re-sorted)."""
    header = msgspec.structs.replace(fresh, remapping=journal.header.run)
    files = [file for file in [*outputs, merged_path(outputs[0])] if file.exists()]
    with Places(journal, index, in_place=in_place) as places:
        for file in files:
            copy_kept(file, _waiting(file, header), header.run, places.keep)
    carried = Journal.create(journal.path, header, index)
    journal.close()
    finish_carrying(header, files)
    return carried


def finish_carrying(header: Header, outputs: list[Path]) -> None:
    """Put results that wait beside the outputs in their places."""
    for file in [*outputs, merged_path(outputs[0])]:
        if header.remapping is not None and _waiting(file, header).exists():
            take_place(_waiting(file, header), file)


def _waiting(file: Path, header: Header) -> Path:
    return file.with_name(f"{file.name}.{header.run}")


class Places:
    """Where each line of an earlier input stands in a new one, by digest; each place is given once."""

    def __init__(self, journal: Journal, index: Index, *, in_place: bool) -> None:
        self._journal = journal
        self._index = index
        self._in_place = in_place
        self._given = bytearray(index.num_lines + 1)
        self._base = sqlite3.connect("")
        if not in_place:
            self._base.executescript("PRAGMA journal_mode=OFF; CREATE TABLE lines (digest BLOB, number INTEGER);")
            rows = ((digest, place) for place, digest in enumerate(index_digests(index), 1))
            self._base.executemany("INSERT INTO lines VALUES (?, ?)", rows)
            self._base.execute("CREATE INDEX by_digest ON lines (digest)")

    def keep(self, result: Result) -> int | None:
        """The new number of a result, or None."""
        header = self._journal.header
        if result.run != header.run or not 0 < result.number <= header.num_lines:
            return None
        number = next((place for place in self._places(result.number) if not self._given[place]), None)
        if number is not None:
            self._given[number] = 1
        return number

    def _places(self, number: int) -> list[int]:
        digest = self._journal.digest(number)
        if self._in_place:
            is_there = number <= self._index.num_lines and self._digest_now(number) == digest
            return [number] if is_there else []
        return [row[0] for row in self._base.execute("SELECT number FROM lines WHERE digest = ? ORDER BY number", (digest,))]

    def _digest_now(self, number: int) -> bytes:
        return os.pread(self._index.digests.fileno(), DIGEST_BYTES, (number - 1) * DIGEST_BYTES)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

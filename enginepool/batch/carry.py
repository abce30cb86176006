"""Carries results over to an input that has changed: those of lines that are still in it, wherever they stand there now.

First the kept results are written beside the outputs, then the new journal, then they take the outputs' places. A run that
was cut off in between finds a journal whose results still wait beside (`finish_carrying`), or the old one, and nothing has changed.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import msgspec

from enginepool.batch.earlier import DRAFT, Result, copy_kept, take_place
from enginepool.batch.index import Index
from enginepool.batch.journal import Claim, Header, Journal, index_digests
from enginepool.batch.merge import merged_path

LEFT = re.compile(rf"carried-[0-9a-f]{{12}}|{DRAFT}|earlier\.{DRAFT}")
"""Endings of files that a run which was cut off may leave beside an output."""


def carry_over(journal: Journal, claim: Claim, fresh: Header, index: Index, outputs: list[Path]) -> Journal:
    """Keep what still fits. Results of an ordered run that wait to be merged go back to the output first."""
    header = msgspec.structs.replace(fresh, remapping=journal.header.run)
    with Moves(journal, index) as moves:
        for file in outputs:
            sources = [file, merged_path(file)] if file == outputs[0] else [file]
            copy_kept([source for source in sources if source.exists()], _waiting(file, header), header.run, moves.keep)
    carried = Journal.create(claim, header, index)
    journal.close()
    finish_carrying(header, outputs)
    return carried


def finish_carrying(header: Header, outputs: list[Path]) -> None:
    """Put results that wait beside the outputs in their places, and remove what another try has left."""
    for file in outputs:
        waiting = _waiting(file, header)
        if header.remapping is not None and waiting.exists():
            merged_path(file).unlink(missing_ok=True)  # what it held waits too
            take_place(waiting, file)
        for other in file.parent.iterdir():
            if other.name.startswith(f"{file.name}.") and LEFT.fullmatch(other.name.removeprefix(f"{file.name}.")):
                other.unlink(missing_ok=True)


def _waiting(file: Path, header: Header) -> Path:
    return file.with_name(f"{file.name}.carried-{header.run}")


class Moves:
    """Where each line of an earlier input stands in a new one, by digest; each place is given once."""

    def __init__(self, journal: Journal, index: Index) -> None:
        self._journal = journal
        self._base = sqlite3.connect("")
        self._base.executescript("PRAGMA journal_mode=OFF; CREATE TABLE lines (digest BLOB, number INTEGER);")
        rows = ((digest, place) for place, digest in enumerate(index_digests(index), 1))
        self._base.executemany("INSERT INTO lines VALUES (?, ?)", rows)
        self._base.execute("CREATE INDEX by_digest ON lines (digest, number)")

    def keep(self, result: Result) -> int | None:
        """The new number of a result, or None."""
        header = self._journal.header
        if result.run != header.run or not 0 < result.number <= header.num_lines:
            return None
        digest = self._journal.digest(result.number)
        found = self._base.execute("SELECT rowid, number FROM lines WHERE digest = ? ORDER BY number LIMIT 1", (digest,)).fetchone()
        if found is None:
            return None
        self._base.execute("DELETE FROM lines WHERE rowid = ?", found[:1])
        return int(found[1])

    def __enter__(self) -> Moves:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

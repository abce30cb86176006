"""What is still to be done of an input, in its order: lines as requests, lines at fault, and in ordered runs results to merge in."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from enginepool.batch.earlier import OPEN
from enginepool.batch.index import Index, digest_of
from enginepool.batch.journal import index_digests
from enginepool.batch.lines import InputFile
from enginepool.batch.request import BatchRequest, LineFault, read_request
from enginepool.batch.resume import Progress
from enginepool.errors import SettingsError


class Entry(msgspec.Struct, frozen=True):
    """One line of the input and what there is to do with it; bytes are an earlier run's result, ready to be written."""

    number: int
    what: BatchRequest | LineFault | bytes


def entries(source: InputFile, index: Index, progress: Progress, max_line_bytes: int) -> Iterator[Entry]:
    """Read the input once more. Raises SettingsError at the first line that is not what it was when it was indexed."""
    digests = index_digests(index)
    number = 0
    for line in source:
        number = line.number
        if digest_of(line) != next(digests, None):
            raise SettingsError(_changed(source, f"line {number} is not what it was"))
        if line.is_blank:
            continue
        if progress.states[number] == OPEN:
            yield Entry(number, read_request(line, max_line_bytes))
        elif progress.earlier is not None and (result := progress.earlier.take(number)) is not None:
            yield Entry(number, result)
    if number != index.num_lines:
        raise SettingsError(_changed(source, f"it ends after line {number}, and had {index.num_lines}"))


def _changed(source: InputFile, how: str) -> str:
    return f"input {source.path} has changed while it was read: {how}; what was written belongs to the file as it was"

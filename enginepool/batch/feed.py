"""What is still to be done of an input, in its order: lines as requests, lines at fault, and in ordered runs results to merge in."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from enginepool.batch.earlier import OPEN
from enginepool.batch.lines import InputFile
from enginepool.batch.request import BatchRequest, LineFault, read_request
from enginepool.batch.resume import Progress
from enginepool.errors import SettingsError


class Entry(msgspec.Struct, frozen=True):
    """One line of the input and what there is to do with it; bytes are an earlier run's result, ready to be written."""

    number: int
    what: BatchRequest | LineFault | bytes


def entries(source: InputFile, progress: Progress, max_line_bytes: int) -> Iterator[Entry]:
    """Read the input once. Raises SettingsError when it has become longer or shorter since it was indexed."""
    last = len(progress.states) - 1
    number = 0
    for line in source:
        number = line.number
        if number > last:
            break
        if line.is_blank:
            continue
        if progress.states[number] == OPEN:
            yield Entry(number, read_request(line, max_line_bytes))
        elif progress.earlier is not None and (result := progress.earlier.take(number)) is not None:
            yield Entry(number, result)
    if number != last:
        raise SettingsError(f"input {source.path} has changed while it was read; what was written belongs to the file as it was")

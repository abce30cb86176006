"""The physical lines of an input file: bytes that end at a newline only, each with its number, none larger than the limit."""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from enginepool.errors import SettingsError

BOM = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 20
_SIGNS = {
    b"\xff\xfe": "UTF-16 (or UTF-32) text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; decompress it first",
    b"BZh": "compressed with bzip2; decompress it first",
    b"\xfd7zXZ": "compressed with xz; decompress it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PAR1": "a Parquet file, not JSON lines",
}


class Line(msgspec.Struct, frozen=True):
    """One physical line, counted from 1, without line end and byte order mark. One that `is_cut` is too long and only begun."""

    number: int
    data: bytes
    is_cut: bool = False

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing on it."""
        return not self.data and not self.is_cut


class InputFile:
    """An input that can be read from its start as often as one likes; `.gz` files are read as what is in them.

    Raises SettingsError for what can't be read or is no UTF-8 text at all, before anything is started.
    """

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        self.path = path
        self._max_line_bytes = max_line_bytes
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise SettingsError(f"input {path}: not a file; the input is read twice, so write it to a file first")
            with self._open() as file:
                self._check_start(file.read(8))
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"input {path}: {reason}") from None

    def __iter__(self) -> Iterator[Line]:
        with self._open() as file:
            number = 0
            while data := file.readline(self._max_line_bytes + 2):
                number += 1
                is_whole = data.endswith(b"\n") or len(data) <= self._max_line_bytes
                if not is_whole:
                    _skip_line(file)
                data = data.removeprefix(BOM).strip(b" \t\r\n")
                yield Line(number, data, is_cut=not is_whole)

    @property
    def identity(self) -> os.stat_result:
        """What tells the file from others, under whatever name."""
        return self.path.stat()

    def _open(self) -> BinaryIO:
        if self.path.suffix == ".gz":
            return gzip.open(self.path, "rb")  # type: ignore[return-value]
        return self.path.open("rb", buffering=BUFFER_BYTES)

    def _check_start(self, start: bytes) -> None:
        kind = next((kind for sign, kind in _SIGNS.items() if start.startswith(sign)), None)
        if start.startswith(b"\x1f\x8b"):
            kind = "compressed with gzip; name it .gz, then it is read as it is"
        elif kind is None and b"\0" in start:
            kind = "not UTF-8 text (UTF-16 without a mark, or binary data)"
        if kind is not None:
            raise SettingsError(f"input {self.path} is {kind}")


def _skip_line(file: BinaryIO) -> None:
    while (data := file.readline(BUFFER_BYTES)) and not data.endswith(b"\n"):
        pass

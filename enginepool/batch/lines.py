"""The physical lines of an input file: bytes that end at a newline only, each with its number, none larger than the limit."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from enginepool.errors import SettingsError

BOM = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 20
STDIN = "-"
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
        with self._told():
            mode = path.stat().st_mode if str(path) != STDIN else stat.S_IFIFO
            if stat.S_ISDIR(mode):
                raise SettingsError(f"input {path} is a folder, not a file")
            if not stat.S_ISREG(mode):
                raise SettingsError(f"input {path} is not a file; the input is read twice, so write it to a file first")
            with self._open() as file:
                self._check_start(file.read(8))

    def __iter__(self) -> Iterator[Line]:
        """Raises SettingsError where it can't be read on."""
        number = 0
        with self._told(lambda: f", after line {number}"), self._open() as file:
            while data := file.readline(self._max_line_bytes + 2):
                number += 1
                if not data.endswith(b"\n"):
                    _skip_line(file)
                is_cut = len(data.removesuffix(b"\n").removesuffix(b"\r")) > self._max_line_bytes
                yield Line(number, data.removeprefix(BOM).strip(b" \t\r\n"), is_cut)

    @contextmanager
    def _told(self, place: Callable[[], str] = str) -> Iterator[None]:
        try:
            yield
        except EOFError:
            raise SettingsError(f"input {self.path}{place()}: the compressed data is cut off") from None
        except zlib.error as error:
            raise SettingsError(f"input {self.path}{place()}: the compressed data is damaged ({error})") from None
        except OSError as error:
            raise SettingsError(f"input {self.path}{place()}: {error.strerror or error}") from None

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

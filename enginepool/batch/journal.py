"""The journal beside an output: which input, line by line, and which settings its results belong to; locked while a run lasts.

The file is one line of JSON (`Header`), then one hexadecimal digest a physical line of the input. It is written once, before
the output is begun; what is done is read from the output itself.

Two locks keep other processes out. Whoever begins or continues a run holds the draft beside the journal (`Claim`) until the
journal is its own; a new journal is that draft, renamed, so that there is no moment in which nobody holds either.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from enginepool.batch.file_lock import lock
from enginepool.batch.index import DIGEST_BYTES, Index
from enginepool.errors import SettingsError

VERSION = 1
ROW_BYTES = 2 * DIGEST_BYTES + 1


class Header(msgspec.Struct, frozen=True):
    """What a run is of. `remapping` names the run whose results are being carried over to another input."""

    run: str
    input: str
    num_lines: int
    num_requests: int
    fingerprint: str
    settings: dict[str, Any]
    remapping: str | None = None
    version: int = VERSION


class Claim:
    """The right to begin or to continue a run, for as long as the block lasts. Raises SettingsError when another process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft = path.with_name(f"{path.name}.draft")
        try:
            self.file = _open_locked(self.draft, path)
        except OSError as error:
            raise SettingsError(f"journal {path}: {error.strerror}; nothing was started") from None
        self.is_used = False

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_used:
            self.draft.unlink(missing_ok=True)
            self.file.close()


class Journal:
    """A journal that this process holds."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, start: int) -> None:
        self.path = path
        self.header = header
        self._file = file
        self._start = start

    @classmethod
    def open(cls, path: Path) -> Journal | None:
        """Take the journal of an earlier run; None when there is none, or one that was cut off before any result.

        Raises SettingsError when another process is at work on it, or it is none of ours.
        """
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SettingsError(f"journal {path}: {error.strerror}") from None
        try:
            lock(file.fileno(), str(path.with_suffix("")))
            header, start = cls._read_header(path, file)
        except SettingsError:
            file.close()
            raise
        is_whole = header is not None and os.fstat(file.fileno()).st_size == start + header.num_lines * ROW_BYTES
        if header is None or not is_whole:
            file.close()
            return None
        return cls(path, file, header, start)

    @staticmethod
    def _read_header(path: Path, file: BinaryIO) -> tuple[Header | None, int]:
        text = file.readline(1 << 20)
        if not text.endswith(b"\n"):
            return None, 0
        try:
            header = msgspec.json.decode(text, type=Header)
        except msgspec.DecodeError:
            raise SettingsError(f"{path} is no journal of enginepool run-batch; name another output, or move it away") from None
        if header.version != VERSION:
            raise SettingsError(f"{path} was written by another version of enginepool ({header.version}, this one has {VERSION})")
        return header, len(text)

    @classmethod
    def create(cls, claim: Claim, header: Header, index: Index) -> Journal:
        """Write one and take its place, durably, before anything of the output is written."""
        file = claim.file
        file.truncate(0)
        start = file.write(msgspec.json.encode(header) + b"\n")
        index.digests.seek(0)
        while digests := index.digests.read(DIGEST_BYTES * 10_000):
            file.write(digests.hex("\n", DIGEST_BYTES).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        claim.draft.rename(claim.path)
        claim.is_used = True
        sync_folder(claim.path.parent)
        return cls(claim.path, file, header, start)

    def digests(self) -> Iterator[bytes]:
        """The digest of each line of the input that this journal was made for."""
        self._file.seek(self._start)
        while rows := self._file.read(ROW_BYTES * 10_000):
            yield from (bytes.fromhex(row.decode()) for row in rows.splitlines())

    def digest(self, number: int) -> bytes:
        """The digest of one line, counted from 1."""
        row = os.pread(self._file.fileno(), ROW_BYTES - 1, self._start + (number - 1) * ROW_BYTES)
        return bytes.fromhex(row.decode())

    def close(self) -> None:
        """Let it go; the file stays."""
        self._file.close()

    def input_changes(self, index: Index) -> str | None:
        """What differs between the input of this journal and another one, in words; None when nothing does."""
        if (index.fingerprint, index.num_lines) == (self.header.fingerprint, self.header.num_lines):
            return None
        return _describe_changes(self.digests(), index_digests(index), self.header.num_lines, index.num_lines)

    def settings_changes(self, settings: dict[str, Any]) -> list[str]:
        """Which settings that matter for answers or for the output's form differ; of a running pool fewer are known."""
        before = self.header.settings
        names = [name for name in before if name in settings and before[name] != settings[name]]
        return [f"{name} was {before[name]!r}, is {settings[name]!r}" for name in names]


def index_digests(index: Index) -> Iterator[bytes]:
    """The digest of each line that was indexed."""
    index.digests.seek(0)
    while chunk := index.digests.read(DIGEST_BYTES * 10_000):
        yield from (chunk[place : place + DIGEST_BYTES] for place in range(0, len(chunk), DIGEST_BYTES))


def _open_locked(draft: Path, path: Path) -> BinaryIO:
    """Open and lock the draft; again where the one that was opened has been renamed or removed before it was locked."""
    while True:
        file = os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            lock(file.fileno(), str(path.with_suffix("")))
            if os.path.samestat(os.fstat(file.fileno()), os.stat(draft)):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _describe_changes(old: Iterator[bytes], new: Iterator[bytes], num_old: int, num_new: int) -> str:
    first, differing, sums = None, 0, Counter[str]()
    number = 0
    while (pair := (next(old, None), next(new, None))) != (None, None):
        number += 1
        for side, digest in zip(("old", "new"), pair, strict=True):
            sums[side] += int.from_bytes(digest or b"", "big")
        if pair[0] != pair[1] and None not in pair:
            differing += 1
            first = first or number
    if first is None:
        count = abs(num_new - num_old)
        return f"{count} line{'s were' if count > 1 else ' was'} {'added' if num_new > num_old else 'removed'} at the end"
    if num_new == num_old and sums["old"] == sums["new"]:
        return f"the same lines stand in another order, from line {first} on"
    counts = "" if num_new == num_old else f", and there are {num_new} lines instead of {num_old}"
    return f"line {first} differs{f', and {differing - 1} after it' if differing > 1 else ''}{counts}"

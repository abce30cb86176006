"""The results of an earlier run: which lines are done, what was torn off at the end, and how they are carried over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from enginepool.batch.answers import line_id
from enginepool.batch.journal import sync_folder
from enginepool.errors import SettingsError

OPEN, OK, FAILED = 0, 1, 2
NULL = b"null"
DRAFT = "enginepool-draft"


class _Head(msgspec.Struct):
    """What has to be known of an output line."""

    id: str
    error: msgspec.Raw = msgspec.Raw(NULL)


class _Whole(msgspec.Struct):
    """A line as it stands, to be given another number."""

    id: str
    custom_id: msgspec.Raw
    response: msgspec.Raw
    error: msgspec.Raw
    enginepool: dict[str, msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET


class Result(msgspec.Struct, frozen=True):
    """One earlier output line: the input line it answers, and whether with an error."""

    run: str
    number: int
    is_failed: bool
    data: bytes


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode
Keep = Callable[[Result], int | None]
"""The number that a result is to have from now on, or None to drop it."""


def read_results(path: Path) -> Iterator[Result]:
    """The whole lines of an output file. Raises SettingsError for one in the middle that is no result."""
    if not path.exists():
        return
    with path.open("rb", buffering=1 << 20) as file:
        for place, data in enumerate(file, 1):
            result = _read(data)
            if result is None:
                raise SettingsError(f"{path}, line {place}: not a result of enginepool run-batch; --overwrite begins anew")
            yield result


def drop_torn_tail(path: Path) -> int:
    """Cut off what a crash has left of a line at the end, and say how many bytes that was."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    end = _end_of_results(path)
    if end < size:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return size - end


def _end_of_results(path: Path) -> int:
    """Where the last good line ends, when nothing good comes after the first bad one."""
    end = place = 0
    is_torn = False
    with path.open("rb", buffering=1 << 20) as file:
        for data in file:
            place += len(data)
            if data.endswith(b"\n") and _read(data) is not None:
                if is_torn:
                    return os.fstat(file.fileno()).st_size  # bad in the middle: not for us to cut
                end = place
            else:
                is_torn = True
    return end


def rewrite(path: Path, run: str, keep: Keep) -> None:
    """Put a file in the place of `path` that holds what is to be kept, renumbered as results of `run`."""
    if path.exists():
        draft = path.with_name(f"{path.name}.{DRAFT}")
        copy_kept([path], draft, run, keep)
        take_place(draft, path)


def copy_kept(paths: list[Path], draft: Path, run: str, keep: Keep) -> None:
    """Write what is to be kept of some files to another one, durably."""
    with draft.open("wb") as file:
        for result in chain.from_iterable(map(read_results, paths)):
            number = keep(result)
            if number is not None:
                is_same = (result.run, result.number) == (run, number)
                file.write(result.data if is_same else renumbered(result.data, run, number))
        file.flush()
        os.fsync(file.fileno())


def take_place(draft: Path, path: Path) -> None:
    """Put a finished file in the place of another."""
    if path.exists():
        os.chmod(draft, path.stat().st_mode & 0o7777)
    draft.rename(path)
    sync_folder(path.parent)


def renumbered(data: bytes, run: str, number: int) -> bytes:
    """The same answer as that of another input line."""
    whole = _decode_whole(data)
    whole.id = line_id(run, number)
    if isinstance(whole.enginepool, dict):
        whole.enginepool["line"] = msgspec.Raw(str(number).encode())
    return msgspec.json.encode(whole) + b"\n"


def _read(data: bytes) -> Result | None:
    try:
        head = _decode_head(data)
        name, run, number = head.id.split("-")
        return Result(run, int(number), bytes(head.error) != NULL, data) if name == "enginepool" else None
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None

"""The first pass over an input: its fingerprint line by line, how many requests it holds, and whether its ids are unique."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Callable
from itertools import islice
from typing import IO

import msgspec

from enginepool.batch.lines import InputFile, Line
from enginepool.batch.request import read_head
from enginepool.errors import SettingsError

DIGEST_BYTES = 8
MOST_SHOWN = 5
CHUNK = 10_000
ROWS = "CREATE TABLE ids (id BLOB, line INTEGER)"
DOUBLED = "FROM (SELECT min(line) AS first, max(line) AS last FROM ids GROUP BY id HAVING count(*) > 1)"


class Index(msgspec.Struct):
    """What the first pass has found. `digests` holds DIGEST_BYTES for each physical line, `fingerprint` is of all of them."""

    num_lines: int
    num_requests: int
    num_chats: int
    fingerprint: str
    digests: IO[bytes]

    def close(self) -> None:
        """Let go of the temporary file."""
        self.digests.close()


def digest_of(line: Line) -> bytes:
    """The fingerprint of one line; line ends and blanks around it don't count."""
    return hashlib.blake2b(line.data, digest_size=DIGEST_BYTES).digest()


def index_input(source: InputFile, on_line: Callable[[int], None] = lambda _: None) -> Index:
    """Read it once, in bounded memory: what grows with the file lies in temporary files. Raises SettingsError for doubled ids."""
    try:
        digests: IO[bytes] = tempfile.TemporaryFile(prefix="enginepool-batch-")  # noqa: SIM115 (the index keeps it)
        try:
            return _index(source, digests, on_line)
        except BaseException:
            digests.close()
            raise
    except (OSError, sqlite3.Error) as error:  # the input's own are told by InputFile
        raise SettingsError(f"input {source.path} can't be checked in the temporary folder {tempfile.gettempdir()}: {error}") from None


def _index(source: InputFile, digests: IO[bytes], on_line: Callable[[int], None]) -> Index:
    whole = hashlib.blake2b(digest_size=16)
    num_lines = num_requests = num_chats = 0
    with Ids() as ids:
        for line in source:
            digest = digest_of(line)
            whole.update(digest)
            digests.write(digest)
            num_lines = line.number
            if line.is_blank:
                continue
            num_requests += 1
            head = read_head(line)
            num_chats += head.is_chat
            if head.custom_id is not None:
                ids.add(head.custom_id, line.number)
            on_line(line.number)
        if num_doubled := ids.count_doubled():
            raise SettingsError(_describe(source, num_doubled, ids.doubled()))
    digests.flush()
    return Index(num_lines, num_requests, num_chats, whole.hexdigest(), digests)


class Ids:
    """Ids by line in a temporary database, so that a file of any size can be checked."""

    def __init__(self) -> None:
        self._base = sqlite3.connect("")
        self._base.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS};")
        self._rows: list[tuple[bytes, int]] = []

    def add(self, custom_id: str, number: int) -> None:
        """Note one."""
        self._rows.append((hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest(), number))
        if len(self._rows) >= CHUNK:
            self._flush()

    def count_doubled(self) -> int:
        """How many ids stand more than once."""
        self._flush()
        return int(self._base.execute(f"SELECT count(*) {DOUBLED}").fetchone()[0])

    def doubled(self) -> list[tuple[int, int]]:
        """The first and the last line of the first MOST_SHOWN of them."""
        return list(self._base.execute(f"SELECT first, last {DOUBLED} ORDER BY 1 LIMIT {MOST_SHOWN}"))

    def _flush(self) -> None:
        self._base.executemany("INSERT INTO ids VALUES (?, ?)", self._rows)
        self._rows.clear()

    def __enter__(self) -> Ids:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()


def _describe(source: InputFile, num_doubled: int, doubled: list[tuple[int, int]]) -> str:
    last = dict(doubled)
    named = [(read_head(line).custom_id, line.number) for line in islice(source, max(last)) if line.number in last]
    shown = "; ".join(f"{custom_id!r:.80} on lines {number} and {last[number]}" for custom_id, number in named)
    more = f"; and {num_doubled - len(doubled):,} more" if num_doubled > len(doubled) else ""
    return f"input {source.path}: results could not be told apart, since a custom_id must be unique: {shown}{more}"

"""The lines of a batch file: what ends one, what is tolerated, and what is no input at all."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from enginepool.batch.index import index_input
from enginepool.batch.lines import BOM, InputFile, Line
from enginepool.errors import SettingsError

LIMIT = 1000


def _read(path: Path, content: bytes, limit: int = LIMIT) -> list[Line]:
    path.write_bytes(content)
    return list(InputFile(path, limit))


def _refusal(path: Path) -> str:
    with pytest.raises(SettingsError) as raised:
        list(InputFile(path, LIMIT))
    assert str(path) in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "data"),
    [
        pytest.param(b"a\nb\n", [b"a", b"b"], id="plain"),
        pytest.param(b"a\nb", [b"a", b"b"], id="no newline at the end"),
        pytest.param(BOM + b"a\r\nb\r\n", [b"a", b"b"], id="byte order mark and CRLF"),
        pytest.param(b"a\n" + BOM + b"b\n", [b"a", b"b"], id="mark in the middle of two joined files"),
        pytest.param(b" a \t\n", [b"a"], id="blanks around"),
        pytest.param(b"a\rb\n", [b"a\rb"], id="a carriage return inside"),
        pytest.param("a\u2028b\u0085c\x0bd\x0c\x1ce\n".encode(), ["a\u2028b\u0085c\x0bd\x0c\x1ce".encode()], id="other line ends"),
        pytest.param(b"", [], id="empty"),
    ],
)
def test_record_ends_at_a_newline_only(tmp_path: Path, content: bytes, data: list[bytes]) -> None:
    assert [line.data for line in _read(tmp_path / "in", content)] == data


def test_numbers_count_physical_lines(tmp_path: Path) -> None:
    lines = _read(tmp_path / "in", BOM + b"a\r\n\r\nb\n   \t\n\nc")
    assert [(line.number, line.data) for line in lines if not line.is_blank] == [(1, b"a"), (3, b"b"), (6, b"c")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_line_of_the_largest_size_is_whole_and_one_byte_more_is_cut(tmp_path: Path, end: bytes) -> None:
    largest, larger = b"x" * LIMIT, b"x" * (LIMIT + 1)
    assert [line.is_cut for line in _read(tmp_path / "in", largest + end)] == [False]
    assert [line.is_cut for line in _read(tmp_path / "in", larger + end)] == [True]


def test_lines_after_one_that_is_too_long_are_read(tmp_path: Path) -> None:
    lines = _read(tmp_path / "in", b"a\n" + b"x" * (5 << 20) + b"\nb\n")
    assert [(line.number, line.is_cut) for line in lines] == [(1, False), (2, True), (3, False)]
    assert lines[2].data == b"b"


def test_huge_line_of_spaces_is_too_long_and_not_blank_and_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "in").open("wb") as file:
        for _ in range(50):
            file.write(b" " * (1 << 20))
        file.write(b"\nb\n")
    source = InputFile(tmp_path / "in", 1 << 20)
    tracemalloc.start()
    lines = [(line.is_cut, line.is_blank) for line in source]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == [(True, False), (False, False)]
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("{}\n".encode("utf-16"), "UTF-16", id="UTF-16"),
        pytest.param("\ufeff{}\n".encode("utf-16-be"), "UTF-16", id="UTF-16, big-endian"),
        pytest.param("{}\n".encode("utf-16-le"), "UTF-16", id="UTF-16 without a mark"),
        pytest.param("{}\n".encode("utf-16-be"), "UTF-16", id="UTF-16, big-endian without a mark"),
        pytest.param("{}\n".encode("utf-32"), "UTF-32", id="UTF-32"),
        pytest.param(gzip.compress(b"{}\n"), "gzip; name it .gz", id="gzip"),
        pytest.param(b"\x28\xb5\x2f\xfd\x04\x00", "zstd; decompress it first", id="zstd"),
        pytest.param(b"BZh91AY&SY", "bzip2", id="bzip2"),
        pytest.param(b"\xfd7zXZ\0\0", "xz", id="xz"),
        pytest.param(b"PK\x03\x04\x14\0", "zip archive", id="zip"),
        pytest.param(b"PAR1\x15\x04", "Parquet", id="parquet"),
    ],
)
def test_file_of_another_kind_is_refused_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert told in _refusal(path)


def test_gzip_by_name_is_read_as_it_is(tmp_path: Path) -> None:
    lines = _read(tmp_path / "in.jsonl.gz", gzip.compress(BOM + b"a\r\n") + gzip.compress(b"\nb"))
    assert [(line.number, line.data) for line in lines] == [(1, b"a"), (2, b""), (3, b"b")]


def test_name_of_gzip_and_none_inside_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    path.write_bytes(b'{"custom_id":"a"}\n')
    assert "Not a gzipped file" in _refusal(path)


@pytest.mark.parametrize("damage", ["cut off", "damaged"])
def test_gzip_that_is_not_whole_is_told_with_the_place(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(b"".join(b"%d %s\n" % (number, os.urandom(20).hex().encode()) for number in range(5000)))
    half = len(whole) // 2
    path = tmp_path / "in.gz"
    path.write_bytes(whole[:half] if damage == "cut off" else whole[:half] + b"\0" * 100 + whole[half + 100 :])
    source = InputFile(path, LIMIT)
    with pytest.raises(SettingsError, match=rf"{path}, after line \d+: the compressed data is {damage}|CRC check failed"):
        index_input(source)


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "read twice" in _refusal(tmp_path / "pipe")


def test_standard_input_is_refused_with_the_reason() -> None:
    assert "read twice" in _refusal(Path("-"))


def test_folder_is_refused(tmp_path: Path) -> None:
    assert "is a folder" in _refusal(tmp_path)


def test_missing_file_is_told(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n\n", BOM, b" \r\n\t\n"])
def test_file_without_requests_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").write_bytes(content)
    with closing(index_input(InputFile(tmp_path / "in", LIMIT))) as index:
        assert index.num_requests == 0

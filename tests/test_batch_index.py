"""The first pass over a batch file: unique ids, fingerprints, and memory that does not grow with the file."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from enginepool.batch.index import index_input
from enginepool.batch.lines import InputFile
from enginepool.errors import SettingsError

LINE = '{{"custom_id":"{}","method":"POST","url":"/v1/completions","body":{{"prompt":"p"}}}}\n'


def _source(folder: Path, ids: Iterable[str]) -> InputFile:
    path = folder / "in.jsonl"
    path.write_text("".join(LINE.format(name) for name in ids))
    return InputFile(path, 1 << 20)


def _refusal(source: InputFile) -> str:
    with pytest.raises(SettingsError) as raised:
        index_input(source)
    return str(raised.value)


def _fingerprint(folder: Path, content: bytes) -> str:
    (folder / "in").write_bytes(content)
    with closing(index_input(InputFile(folder / "in", 1 << 20))) as index:
        return index.fingerprint


def test_doubled_ids_are_refused_with_both_lines(tmp_path: Path) -> None:
    assert "'a' on lines 1 and 2; 'b' on lines 4 and 5" in _refusal(_source(tmp_path, "aaxbb"))


def test_id_that_stands_three_times_is_told_once(tmp_path: Path) -> None:
    assert _refusal(_source(tmp_path, "axaya")).endswith("'a' on lines 1 and 5")


def test_many_doubled_ids_are_summed_up(tmp_path: Path) -> None:
    told = _refusal(_source(tmp_path, [str(number) for number in range(3000)] * 2))
    assert "'0' on lines 1 and 3001" in told
    assert told.endswith("'4' on lines 5 and 3005; and 2,995 more")


def test_id_of_a_broken_line_is_taken_too(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"custom_id":"a", "body":\n' + LINE.format("a"))
    assert "'a' on lines 1 and 2" in _refusal(InputFile(tmp_path / "in", 1 << 20))


def test_lines_without_an_id_are_no_doubles(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"custom_id":null}\n{"custom_id":null}\n[]\n[]\n{"custom_id":7}\n{"custom_id":7}\n')
    with closing(index_input(InputFile(tmp_path / "in", 1 << 20))) as index:
        assert (index.num_lines, index.num_requests) == (6, 6)


def test_fingerprint_is_of_the_content_and_not_of_line_ends(tmp_path: Path) -> None:
    assert _fingerprint(tmp_path, b"a\nb\n") == _fingerprint(tmp_path, b"\xef\xbb\xbfa\r\nb") != _fingerprint(tmp_path, b"b\na\n")


def test_memory_is_bounded(tmp_path: Path) -> None:
    source = _source(tmp_path, (str(number) for number in range(60_000)))
    tracemalloc.start()
    with closing(index_input(source)) as index:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert index.num_requests == 60_000
    assert peak < 6 << 20


def test_full_temporary_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert f"temporary folder {tempfile.gettempdir()}: [Errno 28] No space left" in _refusal(_source(tmp_path, "ab"))

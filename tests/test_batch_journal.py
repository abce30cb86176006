"""The journal of a batch run: what it remembers of an input, what differs, in words, and who may hold it."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from batch_help import Rehearsal, ids, write_input

from enginepool.batch.index import Index, index_input
from enginepool.batch.journal import Claim, Header, Journal
from enginepool.batch.lines import InputFile
from enginepool.errors import SettingsError

RUN = "0123456789ab"


def _index(folder: Path, names: str) -> Index:
    return index_input(InputFile(write_input(folder / "in.jsonl", names), 1 << 20))


def _create(path: Path, index: Index) -> Journal:
    with Claim(path) as claim:
        return Journal.create(claim, Header(RUN, "in", index.num_lines, index.num_requests, index.fingerprint, {}), index)


def _difference(folder: Path, before: str, now: str) -> str | None:
    with closing(_index(folder, before)) as index, closing(_create(folder / "out.journal", index)) as journal:
        assert journal.input_changes(index) is None
        with closing(_index(folder, now)) as changed:
            return journal.input_changes(changed)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        pytest.param("abc", "abc", None, id="the same"),
        pytest.param("abcd", "abXd", "line 3 differs", id="one edited"),
        pytest.param("abcd", "aXYd", "line 2 differs, and 1 after it", id="two edited"),
        pytest.param("abc", "abcd", "1 line was added at the end", id="added"),
        pytest.param("abcd", "ab", "2 lines were removed at the end", id="removed"),
        pytest.param("abcd", "abdc", "the same lines stand in another order, from line 3 on", id="reordered"),
        pytest.param("abcd", "acd", "line 2 differs, and 1 after it, and there are 3 lines instead of 4", id="removed in the middle"),
        pytest.param("abc", "xyz", "line 1 differs, and 2 after it", id="another file"),
    ],
)
def test_difference_of_inputs_is_told(tmp_path: Path, before: str, now: str, told: str | None) -> None:
    assert _difference(tmp_path, before, now) == told


def test_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    with closing(_index(tmp_path, "abc")) as index:
        _create(tmp_path / "out.journal", index).close()
        journal = Journal.open(tmp_path / "out.journal")
        assert journal is not None
        with closing(journal):
            assert journal.header.num_lines == 3
            assert [journal.digest(number) for number in (1, 2, 3)] == list(journal.digests())


@pytest.mark.parametrize("size", [0, 10, 150])
def test_journal_that_is_not_whole_is_none(tmp_path: Path, size: int) -> None:
    with closing(_index(tmp_path, "abc")) as index:
        _create(tmp_path / "out.journal", index).close()
    with (tmp_path / "out.journal").open("r+b") as file:
        file.truncate(size)
    assert Journal.open(tmp_path / "out.journal") is None


@pytest.mark.parametrize("content", ['{"a":1}\n', "hello\n", "[]\n"])
def test_file_of_somebody_else_is_not_taken_for_a_journal(tmp_path: Path, content: str) -> None:
    (tmp_path / "out.journal").write_text(content)
    with pytest.raises(SettingsError, match="is no journal of enginepool run-batch"):
        Journal.open(tmp_path / "out.journal")


def test_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    with closing(_index(tmp_path, "a")) as index:
        _create(tmp_path / "out.journal", index).close()
    path = tmp_path / "out.journal"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":9'))
    with pytest.raises(SettingsError, match="another version of enginepool"):
        Journal.open(path)


def test_journal_that_is_held_is_refused_and_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.journal"
    told = pytest.raises(SettingsError, match=r"out\.jsonl is being written by another run-batch")
    with closing(_index(tmp_path, "a")) as index, closing(_create(path, index)), told:
        Journal.open(path)
    journal = Journal.open(path)
    assert journal is not None
    journal.close()


def test_only_one_claim_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.journal"
    with Claim(path), pytest.raises(SettingsError, match="being written by another"):
        Claim(path)
    with Claim(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_claim_that_a_crash_has_left_is_taken_over(tmp_path: Path) -> None:
    leave = (
        f"import os; from pathlib import Path; from enginepool.batch.journal import Claim; Claim(Path({str(tmp_path)!r}, 'j')); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", leave], check=False, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["j.draft"]
    with Claim(tmp_path / "j"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_runs_that_begin_at_the_same_instant_do_not_meet(tmp_path: Path) -> None:
    """Exactly one of each round runs; the others are told, or find all done."""
    for turn in range(10):
        folder = tmp_path / str(turn)
        folder.mkdir()
        write_input(folder / "in.jsonl", "abcdef")
        _run_at_once(folder, 4)
        assert sorted(ids(folder / "out.jsonl")) == list("abcdef")


def _run_at_once(folder: Path, count: int) -> None:
    barrier = threading.Barrier(count)
    unexpected: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            Rehearsal(folder).run(str(number))
        except SettingsError as error:
            if "being written by another" not in str(error):
                unexpected.append(error)
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unexpected == []

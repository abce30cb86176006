"""Going on with a batch run: what is kept, what is done again, what is refused, and that no crash loses or doubles a result."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_help import Rehearsal, doubled, ids, marks, numbers, write_input

from enginepool.errors import SettingsError

NAMES = ["a", "bad1", "c", "d", "bad2", "f"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an input of six lines, two of which fail."""
    write_input(tmp_path / "in.jsonl", NAMES)
    return tmp_path


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of runs that make their results durable take long on a disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as name:
        yield Path(name)


def _all_marks(rehearsal: Rehearsal) -> dict[str, str]:
    """Mark by id over both outputs; each id stands once."""
    found = ids(rehearsal.out) + (ids(rehearsal.errors) if rehearsal.errors else [])
    assert doubled(found) == []
    return marks(rehearsal.out) | (marks(rehearsal.errors) if rehearsal.errors else {})


def _refusal(rehearsal: Rehearsal, **policy: bool) -> str:
    before = rehearsal.out.read_bytes()
    with pytest.raises(SettingsError) as raised:
        rehearsal.run("refused", **policy)
    assert rehearsal.out.read_bytes() == before
    return str(raised.value)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_run_goes_on_where_it_stopped(folder: Path, is_ordered: bool) -> None:
    rehearsal = Rehearsal(folder, is_ordered=is_ordered)
    rehearsal.run("1", stop_after=2)
    rehearsal.run("2", stop_after=2)
    rehearsal.run("3")
    assert _all_marks(rehearsal) == dict(zip(NAMES, "112233", strict=True))
    assert ids(rehearsal.out) == NAMES


def test_run_that_is_done_changes_nothing(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("1")
    before = rehearsal.out.read_bytes()
    assert rehearsal.run("2").notes == []
    assert rehearsal.out.read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.journal"}


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("has_error_file", [False, True])
def test_failed_lines_are_tried_again_only_when_asked(folder: Path, has_error_file: bool, is_ordered: bool) -> None:
    rehearsal = Rehearsal(folder, has_error_file=has_error_file, is_ordered=is_ordered)
    rehearsal.run("1")
    rehearsal.run("2")
    assert set(_all_marks(rehearsal).values()) == {"1"}
    rehearsal.run("3", retry_failed=True)
    assert _all_marks(rehearsal) == dict(zip(NAMES, "131131", strict=True))
    if is_ordered and not has_error_file:
        assert ids(rehearsal.out) == NAMES


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b'{"custom_id":"half', id="half a line"),
        pytest.param('{"custom_id":"é'.encode()[:-1], id="cut in a character"),
        pytest.param(b"\0" * 5000, id="zeros"),
        pytest.param(b"\0" * 50 + b"\n", id="zeros and a newline"),
        pytest.param(b'{"id":"x"}\n{"custom', id="two bad ones"),
    ],
)
def test_torn_tail_is_cut_off_and_told(folder: Path, tail: bytes) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("1", stop_after=3)
    with rehearsal.out.open("ab") as file:
        file.write(tail)
    notes = rehearsal.run("2").notes
    assert notes == [f"{rehearsal.out} ended in the middle of a line; {len(tail)} bytes were cut off"]
    assert _all_marks(rehearsal) == dict(zip(NAMES, "111222", strict=True))


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_last_line_without_its_end_is_done_again(folder: Path, cut: int) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("1", stop_after=3)
    os.truncate(rehearsal.out, rehearsal.out.stat().st_size - cut)
    rehearsal.run("2")
    assert _all_marks(rehearsal) == dict(zip(NAMES, "112222", strict=True))


def test_torn_tail_of_the_error_file_is_cut_off_too(folder: Path) -> None:
    rehearsal = Rehearsal(folder, has_error_file=True)
    rehearsal.run("1", stop_after=3)
    assert rehearsal.errors is not None
    os.truncate(rehearsal.errors, rehearsal.errors.stat().st_size - 5)
    rehearsal.run("2")
    assert _all_marks(rehearsal) == dict(zip(NAMES, "121222", strict=True))


def test_rubbish_in_the_middle_is_refused_with_its_line(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("1")
    lines = rehearsal.out.read_bytes().splitlines(keepends=True)
    rehearsal.out.write_bytes(b"".join([lines[0], b"rubbish\n", *lines[1:]]))
    assert f"{rehearsal.out}, line 2: not a result" in _refusal(rehearsal)


def test_output_without_a_journal_is_refused_and_stays(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("1")
    (folder / "out.jsonl.journal").unlink()
    assert "without the journal" in _refusal(rehearsal)
    rehearsal.run("2", overwrite=True)
    assert set(_all_marks(rehearsal).values()) == {"2"}


def test_results_of_another_run_are_refused(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("1")
    foreign = rehearsal.out.read_bytes()
    rehearsal.run("2", overwrite=True)
    rehearsal.out.write_bytes(foreign)
    assert "a result of another run" in _refusal(rehearsal)


CHANGES = [
    pytest.param(["a", "bad1", "X", "d", "bad2", "f"], "line 3 differs", "11x111", id="edited"),
    pytest.param([*NAMES, "g"], "1 line was added at the end", "111111x", id="added at the end"),
    pytest.param(["g", *NAMES], "line 1 differs, and 5 after it, and there are 7 lines instead of 6", "x111111", id="added at the start"),
    pytest.param(NAMES[:4], "2 lines were removed at the end", "1111", id="removed at the end"),
    pytest.param(NAMES[1:], "line 1 differs, and 4 after it, and there are 5 lines instead of 6", "11111", id="removed at the start"),
    pytest.param(NAMES[::-1], "the same lines stand in another order, from line 1 on", "111111", id="reordered"),
    pytest.param(["u", "v", "w", "x", "y", "z"], "line 1 differs, and 5 after it", "xxxxxx", id="another file"),
]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize(("now", "told", "kept"), CHANGES)
def test_changed_input_is_refused_and_forced_it_keeps_what_fits(
    folder: Path, now: list[str], told: str, kept: str, is_ordered: bool
) -> None:
    rehearsal = Rehearsal(folder, is_ordered=is_ordered)
    rehearsal.run("1")
    write_input(rehearsal.source, now)
    assert f"the input is not the one that {rehearsal.out} was begun with: {told}" in _refusal(rehearsal)
    assert rehearsal.run("x", force=True).notes[0].startswith("forced: the input is not the one")
    assert _all_marks(rehearsal) == dict(zip(now, kept, strict=True))
    assert numbers(rehearsal.out) == {name: number for number, name in enumerate(now, 1)}
    if is_ordered:
        assert ids(rehearsal.out) == now
    assert rehearsal.run("3").notes == []
    assert {path.name for path in folder.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.journal"}


def test_forced_twice_with_an_error_file(folder: Path) -> None:
    rehearsal = Rehearsal(folder, has_error_file=True)
    rehearsal.run("1", stop_after=5)
    for mark, now in (("2", ["g", *NAMES]), ("3", NAMES[2:])):
        write_input(rehearsal.source, now)
        rehearsal.run(mark, force=True)
    assert _all_marks(rehearsal) == {"c": "1", "d": "1", "bad2": "1", "f": "2"}


def test_changed_settings_are_refused_by_name(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.settings = {"model": "m", "engine_args": {"dtype": "half"}, "vllm_flags": ("--a",)}
    rehearsal.run("1", stop_after=3)
    rehearsal.run("2", stop_after=1)
    rehearsal.settings = {"model": "n", "engine_args": {"dtype": "float"}, "vllm_flags": ("--a",)}
    told = _refusal(rehearsal)
    assert "model was 'm', is 'n'; engine_args was {'dtype': 'half'}, is {'dtype': 'float'}; go on with the same" in told
    rehearsal.run("3", force=True)
    assert _all_marks(rehearsal) == dict(zip(NAMES, "111233", strict=True))


@pytest.mark.parametrize("to_ordered", [True, False])
def test_order_may_be_changed_by_force_and_nothing_is_lost(folder: Path, to_ordered: bool) -> None:
    rehearsal = Rehearsal(folder, is_ordered=not to_ordered)
    rehearsal.settings["ordered"] = not to_ordered
    rehearsal.run("1", stop_after=4)
    if to_ordered:
        lines = rehearsal.out.read_bytes().splitlines(keepends=True)
        rehearsal.out.write_bytes(b"".join(reversed(lines)))
    rehearsal.is_ordered = to_ordered
    rehearsal.settings["ordered"] = to_ordered
    rehearsal.run("2", force=True)
    assert _all_marks(rehearsal) == dict(zip(NAMES, "111122", strict=True))
    if to_ordered:
        assert ids(rehearsal.out) == NAMES


def test_run_that_was_cut_off_while_it_merged_goes_on_in_another_order(folder: Path) -> None:
    rehearsal = Rehearsal(folder, is_ordered=True)
    rehearsal.settings["ordered"] = True
    rehearsal.run("1")
    rehearsal.run("2", stop_after=2, retry_failed=True)
    assert (folder / "out.jsonl.earlier").exists()
    rehearsal.is_ordered = False
    rehearsal.settings["ordered"] = False
    rehearsal.run("3", force=True)
    assert _all_marks(rehearsal) == dict(zip(NAMES, "121131", strict=True))
    assert not (folder / "out.jsonl.earlier").exists()


def test_ordered_run_that_has_only_to_merge_does_it_at_once(folder: Path) -> None:
    """No engine is needed for that."""
    rehearsal = Rehearsal(folder, is_ordered=True)
    rehearsal.run("1")
    (folder / "out.jsonl.earlier").write_bytes(rehearsal.out.read_bytes())
    os.truncate(rehearsal.out, 0)
    assert rehearsal.run("2").earlier is None
    assert ids(rehearsal.out) == NAMES
    assert not (folder / "out.jsonl.earlier").exists()


def test_file_with_a_name_like_ours_is_left_alone(folder: Path) -> None:
    for name in ("out.jsonl.202401011200", "out.jsonl.carried-over", "out.jsonl.draft", "out.jsonl.bak"):
        (folder / name).write_text("mine")
    rehearsal = Rehearsal(folder)
    rehearsal.run("1")
    write_input(rehearsal.source, NAMES[::-1])
    rehearsal.run("2", force=True)
    rehearsal.run("3", retry_failed=True)
    assert sum(path.is_file() and path.read_text() == "mine" for path in folder.iterdir()) == 4


CRASHED = 9


class Doom:
    """Kills the process at the `number`th call of those that change what is on disk, before or after it has had its effect."""

    def __init__(self, number: int, *, is_after: bool) -> None:
        self.left = number
        self._is_after = is_after
        for name in ("rename", "unlink", "fsync", "open", "chmod", "ftruncate", "write"):
            setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self._is_after:
                os._exit(CRASHED)
            try:
                return call(*args, **kwargs)
            finally:
                if self.left == 0:
                    os._exit(CRASHED)

        return wrapped


SCENES: dict[str, tuple[bool, bool, list[str], dict[str, bool], dict[str, str]]] = {
    "begin": (False, False, NAMES, {}, dict.fromkeys(NAMES, "1")),
    "retry": (False, False, NAMES, {"retry_failed": True}, {"a": "1", "c": "1", "d": "1"}),
    "retry with error file": (True, False, NAMES, {"retry_failed": True}, {"a": "1", "c": "1", "d": "1"}),
    "retry ordered": (False, True, NAMES, {"retry_failed": True}, {"a": "1", "c": "1", "d": "1"}),
    "retry ordered with error file": (True, True, NAMES, {"retry_failed": True}, {"a": "1", "c": "1", "d": "1"}),
    "carry": (False, False, ["g", *NAMES[::-1]], {"force": True}, dict.fromkeys(NAMES[:5], "1")),
    "carry with error file": (True, False, ["g", *NAMES[::-1]], {"force": True}, dict.fromkeys(NAMES[:5], "1")),
    "carry ordered": (False, True, ["g", *NAMES[::-1]], {"force": True}, dict.fromkeys(NAMES[:5], "1")),
    "carry ordered, and retry": (True, True, ["g", *NAMES], {"force": True, "retry_failed": True}, {"a": "1", "c": "1", "d": "1"}),
}


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("scene", SCENES)
def test_crash_at_any_step_loses_nothing_and_doubles_nothing(memory: Path, scene: str, is_after: bool) -> None:
    """Five lines are done; then the run is changed, dies at one step after another, and goes on by the same command."""
    has_errors, is_ordered, now, policy, kept = SCENES[scene]
    begun = memory / "begun"
    begun.mkdir()
    write_input(begun / "in.jsonl", NAMES)
    if scene != "begin":
        Rehearsal(begun, has_error_file=has_errors, is_ordered=is_ordered).run("1", stop_after=5)
    write_input(begun / "in.jsonl", now)
    number, has_crashed = 0, True
    while has_crashed:
        number += 1
        folder = memory / str(number)
        shutil.copytree(begun, folder)
        rehearsal = Rehearsal(folder, has_error_file=has_errors, is_ordered=is_ordered)
        has_crashed = _dies(rehearsal, number, policy, is_after=is_after)
        rehearsal.run("3", **policy)
        found = _all_marks(rehearsal)
        assert sorted(found) == sorted(now)
        assert scene == "begin" or {name: found[name] for name in kept} == kept
        expected = {"in.jsonl", "out.jsonl", "out.jsonl.journal"} | ({"errors.jsonl"} if has_errors else set())
        assert {path.name for path in folder.iterdir()} == expected
    assert number > 5


def _dies(rehearsal: Rehearsal, number: int, policy: dict[str, bool], *, is_after: bool) -> bool:
    """In a child, so that nothing is tidied up behind it."""
    child = os.fork()
    if child == 0:
        try:
            Doom(number, is_after=is_after)
            rehearsal.run("2", **policy)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, CRASHED)
    return code == CRASHED


def test_run_without_results_may_begin_with_another_input_and_other_settings(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.run("first", stop_after=0)
    assert rehearsal.out.stat().st_size == 0
    write_input(folder / "in.jsonl", ["other", *NAMES])
    rehearsal.settings = {"model": "another"}
    progress = rehearsal.run("second")
    assert (progress.notes, ids(rehearsal.out)) == ([], ["other", *NAMES])


def test_run_of_a_pool_of_its_own_goes_on_in_a_running_one_of_the_same_model(folder: Path) -> None:
    rehearsal = Rehearsal(folder)
    rehearsal.settings = {"model": "m", "engine": "vllm", "vllm_flags": ["--a"]}
    rehearsal.run("own", stop_after=3)
    rehearsal.settings = {"model": "m"}
    assert rehearsal.run("joined").notes == []
    rehearsal.settings = {"model": "n"}
    assert "model was 'm', is 'n'" in _refusal(rehearsal)

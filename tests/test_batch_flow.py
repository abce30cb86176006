"""Batch runs on a running pool: shares, order and windows, inputs that change meanwhile, and memory."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from batch_help import Run, command, ids, line, results, run_command, write_input
from conftest import wait_for

from enginepool import Pool
from enginepool.batch.flags import choose_pool
from enginepool.errors import ExitCode

NAMES = [f"r{number}" for number in range(200)]
pytestmark = pytest.mark.usefixtures("fresh_run_dir")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where results go."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of 200 lines of 4 tokens."""
    return write_input(tmp_path / "in.jsonl", NAMES)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A running pool of that speed."""
    with Pool(engine="echo", workers=2, step_s=0.02, max_num_seqs=2) as pool:
        yield pool


def _endpoint(pool: Pool) -> tuple[str, ...]:
    return ("--endpoint", pool.endpoint)


def test_two_runs_share_a_pool_fairly(tmp_path: Path, pool: Pool) -> None:
    sources = [write_input(tmp_path / f"in{number}.jsonl", NAMES[:100]) for number in (0, 1)]
    runs = [Run(source, tmp_path / f"out{number}.jsonl", pool=_endpoint(pool)) for number, source in enumerate(sources)]
    for run in runs:
        run.wait_until(1)
    head_start = max(run.num_done for run in runs)
    wait_for(lambda: any(run.num_done >= 100 for run in runs), "the end of the first", 40)
    behind = min(run.num_done for run in runs)
    assert [run.finish()[0] for run in runs] == [ExitCode.OK] * 2
    assert behind >= (100 - head_start) // 3, (behind, head_start)


def test_second_run_of_the_same_output_is_refused(source: Path, out: Path, pool: Pool) -> None:
    run = Run(source, out, pool=_endpoint(pool))
    run.wait_until(1)
    second = run_command(source, out, pool=_endpoint(pool))
    assert second.returncode == ExitCode.USAGE
    assert f"{out} is being written by another run-batch" in second.stderr
    assert run.finish()[0] == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


def test_error_file_of_another_run_is_refused_while_it_lasts(tmp_path: Path, source: Path, out: Path, pool: Pool) -> None:
    errors = ("--error-file", str(tmp_path / "errors.jsonl"))
    run = Run(source, out, *errors, pool=_endpoint(pool))
    run.wait_until(1)
    second = run_command(source, tmp_path / "second.jsonl", *errors, "--overwrite", pool=_endpoint(pool))
    assert second.returncode == ExitCode.USAGE
    assert "errors.jsonl is being written by another run-batch" in second.stderr
    assert run.finish()[0] == ExitCode.OK


def test_settings_of_a_pool_are_refused_beside_an_endpoint(source: Path, out: Path) -> None:
    done = run_command(source, out, pool=("--endpoint", "ipc:///nowhere", "--workers", "3", "--batch-size", "4"))
    assert done.returncode == ExitCode.USAGE
    assert "--workers, --batch-size: the pool at --endpoint runs already" in done.stderr


def test_endpoint_without_a_pool_is_told(source: Path, out: Path, tmp_path: Path) -> None:
    done = run_command(source, out, pool=("--endpoint", f"ipc://{tmp_path}/nowhere.sock"))
    assert done.returncode == ExitCode.NO_DISPATCHER
    assert done.stderr.count("\n") == 1


def test_pool_of_another_model_is_told_when_a_run_goes_on(source: Path, out: Path, pool: Pool) -> None:
    run = Run(source, out, "--window", "4", pool=_endpoint(pool))
    run.wait_until(5)
    run.signal(signal.SIGINT)
    assert run.finish()[0] == ExitCode.INTERRUPTED
    journal = out.with_name("out.jsonl.journal")
    journal.write_bytes(journal.read_bytes().replace(b'"model":"echo"', b'"model":"mine"'))
    done = run_command(source, out, pool=_endpoint(pool))
    assert done.returncode == ExitCode.USAGE
    assert "model was 'mine', is 'echo'; go on with the same" in done.stderr


def test_lower_priority_number_goes_first(tmp_path: Path, pool: Pool) -> None:
    late = Run(
        write_input(tmp_path / "late-in.jsonl", NAMES[:120]),
        tmp_path / "late.jsonl",
        "--priority",
        "5",
        "--window",
        "100",
        pool=_endpoint(pool),
    )
    late.wait_until(1)
    first = Run(
        write_input(tmp_path / "first-in.jsonl", NAMES[:30]),
        tmp_path / "first.jsonl",
        "--priority",
        "1",
        "--window",
        "100",
        pool=_endpoint(pool),
    )
    assert first.finish()[0] == ExitCode.OK
    assert late.num_done < 100
    assert late.finish()[0] == ExitCode.OK


def test_window_of_one_has_one_line_in_flight(source: Path, out: Path, pool: Pool) -> None:
    write_input(source, NAMES[:20])
    assert run_command(source, out, "--window", "1", pool=_endpoint(pool)).returncode == ExitCode.OK
    spans = [(result["enginepool"]["timings"]["submitted"], result["enginepool"]["timings"]["finished"]) for result in results(out)]
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert ids(out) == NAMES[:20]


def test_ordered_run_waits_within_its_window_for_a_slow_first_line(tmp_path: Path, out: Path, pool: Pool) -> None:
    lines = [line("slow", max_tokens=60), *map(line, NAMES[:60])]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    assert run_command(tmp_path / "in.jsonl", out, "--ordered", "--window", "16", pool=_endpoint(pool)).returncode == ExitCode.OK
    assert ids(out) == ["slow", *NAMES[:60]]
    timings = [result["enginepool"]["timings"] for result in results(out)]
    begun = [number for number, one in enumerate(timings) if one["submitted"] < timings[0]["finished"]]
    assert max(begun) < 16


def _change(source: Path, how: str) -> None:
    if how == "grows":
        with source.open("a") as file:
            file.write(line("one more"))
    elif how == "shrinks":
        os.truncate(source, source.stat().st_size - 10)
    else:
        with source.open("r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(b"X")


@pytest.mark.parametrize("how", ["grows", "shrinks", "differs"])
def test_input_that_changes_while_it_is_read_is_told(source: Path, out: Path, pool: Pool, how: str) -> None:
    """It happens behind what has been read ahead; what is in flight is finished."""
    with source.open("a") as file:
        file.writelines(line(f"more{number}", prompt="x" * 100_000) for number in range(30))
    run = Run(source, out, "--window", "4", pool=_endpoint(pool))
    run.wait_until(5)
    run.process.send_signal(signal.SIGSTOP)
    _change(source, how)
    run.process.send_signal(signal.SIGCONT)
    code, stderr = run.finish()
    assert code == ExitCode.USAGE
    assert "has changed while it was read: " in stderr
    assert len(ids(out)) == len(set(ids(out))) == (230 if how == "grows" else 229)


def test_model_folder_is_the_same_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    plain = argparse.Namespace(endpoint=None, keys=None, config=None, quiet=True)
    models = {choose_pool(plain, {"model": name}, {}).settings["model"] for name in ("model", "./model/", "link", str(tmp_path / "model"))}
    assert models == {str(tmp_path / "model")}
    assert choose_pool(plain, {"model": "org/name"}, {}).settings["model"] == "org/name"


def _peak_bytes(tmp_path: Path, count: int, pool: Pool) -> int:
    source, out = write_input(tmp_path / f"{count}.jsonl", map(str, range(count))), tmp_path / f"{count}.out"
    process = subprocess.Popen(command(source, out, "--quiet", pool=_endpoint(pool)), stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == ExitCode.OK
    assert out.read_bytes().count(b"\n") == count
    return usage.ru_maxrss * 1024


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    with Pool(engine="echo", workers=2) as pool:
        assert _peak_bytes(tmp_path, 16_000, pool) < _peak_bytes(tmp_path, 3_000, pool) + (8 << 20)

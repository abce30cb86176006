"""Where results go: never over what is read, and a write that fails ends the run with what was done kept."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from batch_help import command, doubled, ids, line, run_command, write_input
from conftest import wait_for

from enginepool.batch.target import OutputFailed, Target, check_distinct, check_folder, resolve
from enginepool.errors import ExitCode, SettingsError

NAMES = [str(number) for number in range(300)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of 300 lines."""
    return write_input(tmp_path / "in.jsonl", NAMES)


def _alias(source: Path, kind: str) -> str:
    other = source.with_name("other.jsonl")
    match kind:
        case "symbolic link":
            other.symlink_to(source)
        case "link to a link":
            source.with_name("between").symlink_to(source)
            other.symlink_to("between")
        case "hard link":
            other.hardlink_to(source)
        case "with a dot":
            return f"{source.parent}/./{source.name}"
        case "relative":
            return os.path.relpath(source)
        case _:
            return str(source)
    return str(other)


@pytest.mark.parametrize("kind", ["same", "with a dot", "relative", "symbolic link", "link to a link", "hard link"])
@pytest.mark.parametrize("flag", ["-o", "--error-file", "--report", "--trace"])
def test_input_is_never_an_output(source: Path, kind: str, flag: str) -> None:
    roles = {"-o": "output", "--error-file": "error file", "--report": "report", "--trace": "trace"}
    with pytest.raises(SettingsError, match="is the same file as input; nothing was touched"):
        check_distinct({"input": str(source), roles[flag]: _alias(source, kind)})


def test_command_refuses_its_input_as_output_also_to_overwrite(source: Path, fresh_run_dir: Path) -> None:
    before = source.read_bytes()
    done = run_command(source, _alias(source, "symbolic link"), "--overwrite")
    assert (done.returncode, source.read_bytes()) == (ExitCode.USAGE, before)
    assert re.fullmatch(r"enginepool run-batch: error: output \S+ is the same file as input; nothing was touched\n", done.stderr)
    assert not fresh_run_dir.exists()


@pytest.mark.usefixtures("fresh_run_dir")
def test_input_is_no_output_by_redirection_either(source: Path) -> None:
    before = source.read_bytes()
    with source.open("ab") as file:
        done = run_command(source, "-", stdout=file)
    assert (done.returncode, source.read_bytes()) == (ExitCode.USAGE, before)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.earlier"])
@pytest.mark.usefixtures("fresh_run_dir")
def test_error_file_is_none_of_the_runs_own_files(source: Path, name: str) -> None:
    done = run_command(source, source.with_name("out.jsonl"), "--error-file", str(source.with_name(name)))
    assert done.returncode == ExitCode.USAGE
    assert "is the same file as" in done.stderr


def test_link_to_nowhere_is_followed(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "real.jsonl")
    assert resolve(str(tmp_path / "out.jsonl")) == str(tmp_path / "real.jsonl")


@pytest.mark.parametrize("role", ["output", "error file", "report", "trace"])
def test_missing_folder_is_told_with_its_role(tmp_path: Path, role: str) -> None:
    with pytest.raises(SettingsError, match=f"{role} .*there is no folder {tmp_path / 'nowhere'}; nothing was started"):
        check_folder(role, str(tmp_path / "nowhere" / "x"))


def test_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is a folder; nothing was started"):
        check_folder("output", str(tmp_path))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, writable at first."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_read_only_folder_is_told_before_anything_starts(source: Path, mounted: Path, fresh_run_dir: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    done = run_command(source, mounted / "out.jsonl")
    assert done.returncode == ExitCode.USAGE
    assert f"the folder {mounted} can't be written to; nothing was started" in done.stderr
    assert not fresh_run_dir.exists()


AS_NOBODY = """
import os, sys
from enginepool.batch.journal import Claim
from enginepool.batch.target import Target, check_folder
from pathlib import Path
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for act in (lambda: check_folder("output", sys.argv[1]), lambda: Target(sys.argv[1]), lambda: Claim(Path(sys.argv[1] + ".journal"))):
    try:
        act()
    except Exception as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_folder_of_another_user_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, f"{name}/out"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        f"output {name}/out: the folder {name} can't be written to; nothing was started",
        f"output {name}/out: Permission denied; nothing was started",
        f"journal {name}/out.journal: Permission denied; nothing was started",
    ]


def _check_then_finish(source: Path, out: Path, done: Any, told: str) -> None:
    """It has ended for want of room, with whole lines; then there is room."""
    assert done.returncode == ExitCode.OUTPUT_FAILED
    kept = ids(out)
    assert 0 < len(kept) < len(NAMES)
    assert out.read_bytes().endswith(b"\n")
    assert told in done.stderr
    assert f"{len(NAMES) - len(kept)} lines are left; the same command goes on from here" in done.stderr


@pytest.mark.usefixtures("fresh_run_dir")
def test_full_disk_ends_the_run_and_keeps_what_is_done(source: Path, mounted: Path) -> None:
    out = mounted / "out.jsonl"
    _check_then_finish(source, out, run_command(source, out, "--window", "8"), f"error: output {out}: No space left on device")
    subprocess.run(["mount", "-o", "remount,size=4m", str(mounted)], check=True)
    assert run_command(source, out).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


@pytest.mark.usefixtures("fresh_run_dir")
def test_limit_of_file_size_ends_the_run_and_keeps_what_is_done(source: Path) -> None:
    out = source.with_name("out.jsonl")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    _check_then_finish(source, out, run_command(source, out, "--window", "8", preexec_fn=limit), f"error: output {out}: File too large")
    assert run_command(source, out).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


def test_torn_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with closing(Target(str(tmp_path / "out"))) as target:
        target.append([b"whole\n"])
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]) if len(data) > 6 else _refuse())
        with pytest.raises(OutputFailed):
            target.append([b"this is torn\n"])
    assert (tmp_path / "out").read_bytes() == b"whole\n"


def _refuse() -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.usefixtures("fresh_run_dir")
@pytest.mark.parametrize("out", ["-", "/dev/stdout"])
def test_closed_pipe_ends_the_run_quietly(source: Path, out: str) -> None:
    run = subprocess.Popen(command(source, out, "--quiet"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    first = run.stdout.readline()
    run.stdout.close()
    run.stdout = None
    stderr = run.communicate(timeout=60)[1]
    assert first.endswith("}\n")
    assert run.returncode == ExitCode.OUTPUT_FAILED
    assert "Traceback" not in stderr
    assert "error" not in stderr


@pytest.fixture
def stuck_pipe() -> Iterator[int]:
    """The end to write of a pipe that nobody reads."""
    read_fd, write_fd = os.pipe()
    yield write_fd
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.usefixtures("fresh_run_dir")
def test_output_that_nobody_reads_can_be_interrupted(source: Path, stuck_pipe: int) -> None:
    """A shell's `| less`: the pipe is full, and stays so."""
    source.write_text("".join(line(name, prompt="x" * 3000, max_tokens=3000) for name in NAMES))
    run = subprocess.Popen(command(source, "-", "--quiet"), stdout=stuck_pipe, stderr=subprocess.PIPE, text=True)
    poll = select.poll()
    poll.register(stuck_pipe, select.POLLOUT)
    try:
        wait_for(lambda: not poll.poll(0), "a full pipe", 30)
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGTERM)
        stderr = run.communicate(timeout=20)[1]
    finally:
        run.kill()
    assert run.returncode == ExitCode.INTERRUPTED, stderr


@pytest.mark.usefixtures("fresh_run_dir")
def test_stream_does_not_mix_its_error_file_with_an_earlier_one(source: Path) -> None:
    errors = source.with_name("errors.jsonl")
    errors.write_text("mine\n")
    done = run_command(source, "-", "--error-file", str(errors))
    assert (done.returncode, errors.read_text()) == (ExitCode.USAGE, "mine\n")
    assert "is there already" in done.stderr
    assert run_command(source, "-", "--error-file", str(errors), "--overwrite").returncode == ExitCode.OK
    assert errors.read_text() == ""


@pytest.mark.usefixtures("fresh_run_dir")
def test_device_takes_results_once(source: Path) -> None:
    assert run_command(source, "/dev/null").returncode == ExitCode.OK
    assert not Path("/dev/null.journal").exists()


@pytest.mark.usefixtures("fresh_run_dir")
def test_relative_and_absolute_paths_are_the_same_run(source: Path) -> None:
    out, errors = source.with_name("out.jsonl"), source.with_name("errors.jsonl")
    assert run_command(source, out, "--error-file", str(errors)).returncode == ExitCode.OK
    again = run_command("in.jsonl", "out.jsonl", "--error-file", "./errors.jsonl", cwd=source.parent)
    assert again.returncode == ExitCode.OK
    assert "nothing to do: all 300 lines are done" in again.stderr
    assert doubled(ids(out)) == []

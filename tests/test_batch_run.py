"""`enginepool run-batch` as a whole: every line ends in one result, whatever comes between, on the echo engine."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batch_help import ECHO, Run, command, doubled, ids, line, results, run_command, write_input
from conftest import ENGINEPOOL, processes_of, wait_for, worker_pids

from enginepool import Pool
from enginepool.batch.flags import choose_pool
from enginepool.errors import ExitCode

SLOW = "[engine_args]\nstep_s = 0.02\nmax_num_seqs = 2\n"
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


@pytest.fixture
def slow(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a pool that makes about 50 of these lines a second."""
    (tmp_path / "slow.toml").write_text(SLOW)
    return (*ECHO, "--config", str(tmp_path / "slow.toml"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A running pool of that speed."""
    with Pool(engine="echo", workers=2, step_s=0.02, max_num_seqs=2) as pool:
        yield pool


def _endpoint(pool: Pool) -> tuple[str, ...]:
    return ("--endpoint", pool.endpoint)


def _finish_later(source: Path, out: Path, *arguments: str) -> None:
    """The same command again, at full speed, ends with every id once."""
    done = run_command(source, out, *arguments)
    assert done.returncode == ExitCode.OK, done.stderr
    assert sorted(ids(out)) == sorted(NAMES)


BAD = [
    b'{"custom_id":"t", "body":',
    b"[1,2]",
    b'"just a string"',
    b"null",
    *[
        line(f"u{number}").replace("/v1/completions", url).encode()
        for number, url in enumerate(["/v1/completion", "http://x/v1/completions"])
    ],
    line("get").replace("POST", "GET").encode(),
    b'{"custom_id":"text","method":"POST","url":"/v1/completions","body":"{}"}',
    line("stream", stream=True).encode(),
    line("nan", temperature=float("nan")).encode(),
    line("huge", temperature="X").replace('"X"', "1e999").encode(),
    line("deep", prompt="X").replace('"X"', "[" * 20_000 + "]" * 20_000).encode(),
    b'{"custom_id":"half","method":"POST","url":"/v1/completions","body":{"prompt":"half \\ud83d"}}',
    b'{"custom_id":"raw","prompt":"\xff\xfe"}',
    line("none").replace('"none"', "null", 1).encode(),
    line("seven").replace('"seven"', "7", 1).encode(),
    line("zero", max_tokens=0).encode(),
    line("long", prompt="x" * 5000).encode(),
    line("large", prompt="x" * 300_000).encode(),
    line("embed").replace("/v1/completions", "/v1/embeddings").encode(),
    line("no prompt", prompt=7).encode(),
]


def _sandwich() -> list[bytes]:
    return [
        b"\xef\xbb\xbf" + line("good0").encode(),
        *[part for number, bad in enumerate(BAD, 1) for part in (bad, line(f"good{number}").encode())],
    ]


@pytest.mark.parametrize("order", [(), ("--ordered",)], ids=["as they finish", "ordered"])
def test_every_line_ends_in_one_result_and_bad_ones_harm_no_other(tmp_path: Path, out: Path, order: tuple[str, ...]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\r\n".join(text.strip() for text in _sandwich()) + b"\r\n\r\n   \r\n" + line("last").encode().strip())
    done = run_command(source, out, "--max-line-bytes", "200000", *order)
    assert done.returncode == ExitCode.FAILED
    found = {result["enginepool"]["line"]: result for result in results(out)}
    count = len(_sandwich())
    assert sorted(found) == [*range(1, count + 1), count + 3]
    good = [result["custom_id"] for result in found.values() if result["error"] is None]
    assert sorted(good) == sorted(["last", *(f"good{number}" for number in range(len(BAD) + 1))])
    bad = [result for result in found.values() if result["error"] is not None]
    assert all(400 <= result["response"]["status_code"] < 500 and result["error"]["error"]["message"] for result in bad)
    assert f"{len(good)} ok, {len(bad)} failed" in done.stderr
    if order:
        assert list(found) == sorted(found)


def test_output_is_strict_json_and_carries_odd_ids(tmp_path: Path, out: Path) -> None:
    odd = ["", 'a "quoted"\nline', "x" * 5000, "\0", "é\u2028"]
    write_input(tmp_path / "in.jsonl", odd, prompt="a\u0000b")
    assert run_command(tmp_path / "in.jsonl", out).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(odd)
    assert {result["response"]["body"]["choices"][0]["text"] for result in results(out)} == {"a\0ba"}


def test_answers_keep_their_order_and_count(tmp_path: Path, out: Path) -> None:
    """Short and long ones in turn, several sequences each, and one that is refused at the fourth place."""
    wanted = {f"item {number}:": ((1, 3, 8)[number % 3], 1 if number % 2 else 120) for number in range(30)}
    lines = [line(name, n=n, max_tokens=length) for name, (n, length) in wanted.items()]
    lines.insert(3, line("long", prompt="x" * 5000))
    (tmp_path / "in.jsonl").write_text("".join(lines))
    assert run_command(tmp_path / "in.jsonl", out, "--ordered").returncode == ExitCode.FAILED
    assert ids(out) == [*list(wanted)[:3], "long", *list(wanted)[3:]]
    for result in results(out):
        if result["custom_id"] in wanted:
            n, length = wanted[result["custom_id"]]
            body = result["response"]["body"]
            assert [choice["index"] for choice in body["choices"]] == list(range(n))
            assert all((result["custom_id"] * 120).startswith(choice["text"]) for choice in body["choices"])
            assert body["usage"]["completion_tokens"] == n * length


def test_results_alone_are_on_stdout_and_plain_lines_on_stderr(source: Path) -> None:
    done = run_command(source, "-")
    assert done.returncode == ExitCode.OK
    assert sorted(json.loads(text)["custom_id"] for text in done.stdout.splitlines()) == sorted(NAMES)
    assert "\r" not in done.stderr
    assert all(text.startswith("enginepool") for text in done.stderr.splitlines())
    assert "r17" not in done.stderr


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("closed", [[0], [2], [0, 2], [0, 1, 2]], ids=str)
def test_closed_standard_streams_harm_nothing(source: Path, out: Path, closed: list[int]) -> None:
    """A log must not get into the output, which would otherwise have the number of a closed stream."""
    done = run_command(source, out, preexec_fn=lambda: _close(closed))
    assert (done.returncode, done.stdout) == (ExitCode.OK, "")
    assert sorted(ids(out)) == sorted(NAMES)
    assert out.read_bytes().count(b"\n") == len(NAMES)


def test_closed_stderr_leaves_stdout_to_the_results(source: Path) -> None:
    done = run_command(source, "-", preexec_fn=lambda: os.close(2))
    assert done.returncode == ExitCode.OK
    assert sorted(json.loads(text)["custom_id"] for text in done.stdout.splitlines()) == sorted(NAMES)


def test_closed_stdout_is_told(source: Path) -> None:
    done = run_command(source, "-", preexec_fn=lambda: os.close(1))
    assert done.returncode == ExitCode.USAGE
    assert "output standard output: it is closed; nothing was started" in done.stderr


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end to write of a pipe that nobody reads and that takes nothing more."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_fd, b"x")
    os.set_blocking(write_fd, True)
    yield write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_stderr_that_is_full_stops_nothing(source: Path, out: Path, pool: Pool, full_pipe: int) -> None:
    assert run_command(source, out, pool=_endpoint(pool), stderr=full_pipe).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


def test_stderr_without_a_reader_stops_nothing(source: Path, out: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    assert run_command(source, out, stderr=write_fd).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)
    os.close(write_fd)


def test_all_lines_failed_has_its_own_exit_code_and_error_file(tmp_path: Path, out: Path) -> None:
    write_input(tmp_path / "in.jsonl", "abc", stream=True)
    done = run_command(tmp_path / "in.jsonl", out, "--error-file", str(tmp_path / "errors"))
    assert done.returncode == ExitCode.ALL_LINES_FAILED
    assert (ids(out), sorted(ids(tmp_path / "errors"))) == ([], ["a", "b", "c"])


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n"], ids=["empty", "blank"])
def test_input_without_lines_starts_no_engine(tmp_path: Path, out: Path, content: bytes, fresh_run_dir: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    done = run_command(tmp_path / "in.jsonl", out)
    assert (done.returncode, out.read_bytes()) == (ExitCode.OK, b"")
    assert "has no lines: the output is empty, and no engine was started" in done.stderr
    assert not fresh_run_dir.exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("".join(map(line, "aabb")).encode(), "'a' on lines 1 and 2; 'b' on lines 3 and 4", id="doubled ids"),
        pytest.param(line("a").encode("utf-16"), "UTF-16", id="UTF-16"),
        pytest.param(gzip.compress(line("a").encode()), "gzip", id="gzip"),
    ],
)
def test_input_that_can_not_be_used_is_told_before_an_engine_is_started(
    tmp_path: Path, out: Path, content: bytes, told: str, fresh_run_dir: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    done = run_command(tmp_path / "in.jsonl", out)
    assert done.returncode == ExitCode.USAGE
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
    assert not fresh_run_dir.exists()


def test_poison_fails_alone(tmp_path: Path, out: Path) -> None:
    lines = [line(name) for name in NAMES[:40]]
    lines[20] = line(NAMES[20], vllm_xargs={"fault": "exit"})
    (tmp_path / "in.jsonl").write_text("".join(lines))
    assert run_command(tmp_path / "in.jsonl", out).returncode == ExitCode.FAILED
    assert sorted(ids(out)) == sorted(NAMES[:40])
    failed = [result for result in results(out) if result["error"] is not None]
    assert [(result["custom_id"], result["enginepool"]["code"]) for result in failed] == [(NAMES[20], "worker_lost")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_finishes_what_is_in_flight(source: Path, out: Path, slow: tuple[str, ...], number: signal.Signals) -> None:
    run = Run(source, out, "--window", "8", pool=slow)
    run.wait_until(10)
    run.signal(number)
    code, stderr = run.finish()
    assert code == 128 + number
    assert "interrupted: finishing " in stderr
    assert f"{200 - run.num_done} lines are left; the same command goes on from here" in stderr
    assert 10 <= run.num_done < 200
    assert list(run.temp.iterdir()) == []
    if number == signal.SIGINT:
        _finish_later(source, out, "--config", slow[-1])


def test_second_signal_stops_at_once_and_leaves_nothing(tmp_path: Path, out: Path, fresh_run_dir: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", NAMES)
    with source.open("a") as file:
        file.write(line("endless", max_tokens=1_000_000))
    (tmp_path / "slow.toml").write_text("[engine_args]\nstep_s = 0.02\n")
    run = Run(source, out, pool=(*ECHO, "--config", str(tmp_path / "slow.toml")))
    run.wait_until(200)
    run.signal(signal.SIGINT)
    told = run.process.stderr
    assert told is not None
    before = _line_with(told, "interrupted: finishing")
    run.signal(signal.SIGINT)
    code, stderr = run.finish(10)
    assert code == ExitCode.INTERRUPTED, before + stderr
    assert "1 line is left" in stderr
    assert not processes_of(fresh_run_dir)
    assert not fresh_run_dir.exists() or not list(fresh_run_dir.iterdir())
    assert list(run.temp.iterdir()) == []


def test_terminal_is_left_as_it_was_after_an_interrupt(source: Path, out: Path, pool: Pool) -> None:
    ours, terminal = os.openpty()
    run = Run(source, out, "--window", "8", pool=_endpoint(pool), stderr=terminal, env=os.environ | {"TERM": "xterm"})
    os.close(terminal)
    run.wait_until(10)
    run.signal(signal.SIGINT)
    shown = b""
    with suppress(OSError):  # its end
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    assert run.finish()[0] == ExitCode.INTERRUPTED
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert shown.index(b"interrupted: finishing") < shown.index(b"\x1b[?25h") < shown.index(b"the same command goes on from here")


def _line_with(stream: Any, words: str) -> str:
    for text in stream:
        if words in text:
            return str(text)
    raise AssertionError(f"{words!r} was not told")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seed", range(3))
def test_signal_while_it_starts_ends_it_and_leaves_nothing(
    source: Path, out: Path, slow: tuple[str, ...], fresh_run_dir: Path, seed: int, number: signal.Signals
) -> None:
    run = Run(source, out, pool=slow)
    threading.Event().wait(random.Random(seed).uniform(0.2, 1.2))  # the moment of the fault, not a condition
    run.signal(number)
    code, stderr = run.finish()
    assert code in (ExitCode.INTERRUPTED, -signal.SIGINT, 128 + number, -number), stderr
    assert "Traceback" not in stderr or "init_import_site" in stderr
    wait_for(lambda: not processes_of(fresh_run_dir), "the end of its pool", 10)
    assert list(run.temp.iterdir()) == []


def test_killed_ten_times_it_ends_with_every_id_once(source: Path, out: Path, slow: tuple[str, ...], fresh_run_dir: Path) -> None:
    moments = random.Random(1)
    seen: list[int] = []
    for _ in range(10):
        run = Run(source, out, pool=slow)
        threading.Event().wait(moments.uniform(0.3, 1.6))  # the moment of the fault, not a condition
        run.process.kill()
        run.finish()
        seen.append(run.num_done)
        assert doubled(ids(out)) == []
        wait_for(lambda: not processes_of(fresh_run_dir), "the end of the killed run's pool", 10)
    assert seen == sorted(seen)
    _finish_later(source, out, "--config", slow[-1])


def test_killed_worker_loses_nothing(source: Path, out: Path, pool: Pool) -> None:
    run = Run(source, out, pool=_endpoint(pool))
    run.wait_until(20)
    os.kill(worker_pids(pool)[0], signal.SIGKILL)
    code, stderr = run.finish()
    assert code == ExitCode.OK, stderr
    assert sorted(ids(out)) == sorted(NAMES)


@pytest.fixture
def served(fresh_run_dir: Path, slow: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """`enginepool serve` with the slow pool: its endpoint and its pid."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen([*ENGINEPOOL, "serve", *slow, "--ready-fd", str(write_fd)], pass_fds=(write_fd,), stderr=subprocess.DEVNULL)
    os.close(write_fd)
    with os.fdopen(read_fd) as ready:
        endpoint = json.loads(ready.read())["endpoint"]
    yield endpoint, process.pid
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(fresh_run_dir), "the end of the pool", 10)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param("kill", ExitCode.ALL_WORKERS_FAILED, id="dispatcher killed"),
        pytest.param("drain", ExitCode.NO_DISPATCHER, id="drained"),
        pytest.param("stop", ExitCode.NO_DISPATCHER, id="stopped"),
    ],
)
def test_pool_that_ends_meanwhile_is_told_and_what_is_done_is_kept(
    source: Path, out: Path, served: tuple[str, int], how: str, expected: ExitCode
) -> None:
    endpoint, pid = served
    run = Run(source, out, pool=("--endpoint", endpoint))
    run.wait_until(20)
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        subprocess.run([*ENGINEPOOL, how, "--endpoint", endpoint], check=True, timeout=30, capture_output=True)
    code, stderr = run.finish()
    assert code == expected, stderr
    assert 20 <= run.num_done < 200
    assert f"{200 - run.num_done} lines are left; the same command goes on from here" in stderr
    assert doubled(ids(out)) == []


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


def test_gzip_by_name_is_read(tmp_path: Path, out: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("".join(map(line, NAMES)).encode()))
    assert run_command(tmp_path / "in.jsonl.gz", out).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


def test_full_pipe_from_the_start_stops_nothing(source: Path, out: Path, full_pipe: int) -> None:
    assert run_command(source, out, stderr=full_pipe).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


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

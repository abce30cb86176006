"""`enginepool run-batch` as a whole: every line ends in one result, and nothing else is written where results go; on the echo engine."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from batch_help import ids, line, results, run_command, write_input

from enginepool import Pool
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
    assert all(400 <= result["response"]["status_code"] < 500 for result in bad)
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
    assert run_command(tmp_path / "in.jsonl", out, "--ordered", "--workers", "2").returncode == ExitCode.FAILED
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
    assert run_command(tmp_path / "in.jsonl", out, "--workers", "2").returncode == ExitCode.FAILED
    assert sorted(ids(out)) == sorted(NAMES[:40])
    failed = [result for result in results(out) if result["error"] is not None]
    assert [(result["custom_id"], result["enginepool"]["code"]) for result in failed] == [(NAMES[20], "worker_lost")]


def test_gzip_by_name_is_read(tmp_path: Path, out: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("".join(map(line, NAMES)).encode()))
    assert run_command(tmp_path / "in.jsonl.gz", out).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)


def test_full_pipe_from_the_start_stops_nothing(source: Path, out: Path, full_pipe: int) -> None:
    assert run_command(source, out, stderr=full_pipe).returncode == ExitCode.OK
    assert sorted(ids(out)) == sorted(NAMES)

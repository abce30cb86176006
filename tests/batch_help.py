"""Batch files and runs over them: one in this process without a pool, and the whole command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from conftest import ENGINEPOOL, wait_for

from enginepool.batch.answers import line_id
from enginepool.batch.earlier import FAILED, OK
from enginepool.batch.feed import entries
from enginepool.batch.index import index_input
from enginepool.batch.lines import InputFile
from enginepool.batch.outbox import Outbox, Ready
from enginepool.batch.resume import Policy, Progress, begin
from enginepool.batch.target import Target

LIMIT = 1 << 20
ECHO = ("--engine", "echo", "--workers", "1")


def line(custom_id: str, **body: Any) -> str:
    """One request of a completion; its prompt is the id."""
    request = {"model": "m", "prompt": custom_id, "max_tokens": 4} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": request}) + "\n"


def write_input(path: Path, ids: Iterable[str], **body: Any) -> Path:
    """A batch file with a line for each id."""
    path.write_text("".join(line(custom_id, **body) for custom_id in ids))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    """The lines of an output."""
    return [json.loads(text) for text in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def ids(path: Path) -> list[str]:
    """The ids of an output, in its order."""
    return [result["custom_id"] for result in results(path)]


def doubled(found: list[str]) -> list[str]:
    """What stands there more than once."""
    return [name for name, count in Counter(found).items() if count > 1]


class Rehearsal:
    """Runs over a folder's `in.jsonl` that make each result by themselves; ids that begin with `bad` fail."""

    def __init__(self, folder: Path, *, has_error_file: bool = False, is_ordered: bool = False) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.errors = folder / "errors.jsonl" if has_error_file else None
        self.is_ordered = is_ordered
        self.settings: dict[str, Any] = {"model": "m"}

    def run(self, mark: str, stop_after: int | None = None, **policy: bool) -> Progress:
        """Begin or go on, and make so many results, which carry `mark`."""
        with ExitStack() as stack:
            index = stack.enter_context(closing(index_input(InputFile(self.source, LIMIT))))
            whole = Policy(is_ordered=self.is_ordered, **policy)
            progress = begin(str(self.source), self.out, self.errors, index, self.settings, whole)
            assert progress.journal is not None
            stack.callback(progress.journal.close)
            targets = [stack.enter_context(closing(Target(str(name)))) for name in (self.out, self.errors) if name]
            outbox = Outbox(targets[0], targets[-1] if self.errors else None, is_ordered=self.is_ordered)
            if progress.count(OK) + progress.count(FAILED) < index.num_requests:
                self._make(progress, outbox, entries(InputFile(self.source, LIMIT), index, progress, LIMIT), mark, stop_after)
                if stop_after is None and progress.earlier is not None:
                    progress.earlier.remove()
        return progress

    def _make(self, progress: Progress, outbox: Outbox, feed: Any, mark: str, stop_after: int | None) -> None:
        for count, entry in enumerate(feed):
            if count == stop_after:
                return
            outbox.expect(entry.number)
            if isinstance(entry.what, bytes):
                outbox.put(entry.number, Ready(entry.what, is_failed=False, is_new=False))
            else:
                outbox.put(entry.number, _result(progress.run, entry.number, entry.what.custom_id, mark))
            outbox.flush()


def _result(run: str, number: int, custom_id: str, mark: str) -> Ready:
    is_bad = custom_id.startswith("bad")
    response = {"status_code": 400 if is_bad else 200, "request_id": mark, "body": None}
    error = {"error": {"message": "no"}} if is_bad else None
    facts = {"line": number}
    whole = {"id": line_id(run, number), "custom_id": custom_id, "response": response, "error": error, "enginepool": facts}
    return Ready(json.dumps(whole).encode() + b"\n", is_bad)


def marks(path: Path) -> dict[str, str]:
    """The mark of each id's result."""
    return {result["custom_id"]: result["response"]["request_id"] for result in results(path)}


def numbers(path: Path) -> dict[str, int]:
    """The number that each id's result has, which its `id` and its `enginepool` agree about."""
    found = {}
    for result in results(path):
        assert int(result["id"].rpartition("-")[2]) == result["enginepool"]["line"]
        found[result["custom_id"]] = result["enginepool"]["line"]
    return found


def command(source: Path | str, out: Path | str, *arguments: str, pool: tuple[str, ...] = ECHO) -> list[str]:
    """The command line of a run."""
    return [*ENGINEPOOL, "run-batch", "-i", str(source), "-o", str(out), *pool, *arguments]


def run_command(source: Path | str, out: Path | str, *arguments: str, pool: tuple[str, ...] = ECHO, **options: Any) -> Any:
    """The whole command to its end; with `returncode`, `stdout` and `stderr`."""
    usual: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True, "timeout": 60}
    return subprocess.run(command(source, out, *arguments, pool=pool), check=False, **usual | options)


class Run:
    """A run as a process of its own group, under test; with its temporary files in `temp`."""

    def __init__(self, source: Path, out: Path, *arguments: str, pool: tuple[str, ...] = ECHO, **options: Any) -> None:
        self.out = out
        self.temp = source.with_name("temp")
        self.temp.mkdir(exist_ok=True)
        usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        usual |= {"env": os.environ | {"TMPDIR": str(self.temp)}, "process_group": 0}
        self.process = subprocess.Popen(command(source, out, *arguments, pool=pool), **usual | options)

    @property
    def num_done(self) -> int:
        """Results that stand in the output."""
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0

    def wait_until(self, count: int) -> None:
        """Wait for so many results."""
        wait_for(lambda: self.num_done >= count or self.process.poll() is not None, f"result {count}", 30)

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def finish(self, timeout_s: float = 40) -> tuple[int, str]:
        """Wait for the end; the exit code and stderr."""
        try:
            stderr = self.process.communicate(timeout=timeout_s)[1]
        finally:
            self.process.kill()
        return self.process.returncode, stderr

"""The end of a run: report, summary, how to go on, and the exit code."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import msgspec

from enginepool.batch import target
from enginepool.batch.ledger import RunLedger
from enginepool.batch.progress import summary_lines
from enginepool.batch.resume import Progress
from enginepool.batch.run import End
from enginepool.batch.summary import plural
from enginepool.batch.target import OutputFailed
from enginepool.batch.watch import say
from enginepool.errors import CallerError, EnginePoolError, ExitCode

MOST_FAILURES = 3


class BatchArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says, apart from the pool."""

    input_file: str
    output_file: str
    error_file: str | None = None
    is_ordered: bool = False
    is_plain: bool = False
    is_strict: bool = False
    retry_failed: bool = False
    force: bool = False
    overwrite: bool = False
    quiet: bool = False
    priority: int = 0
    window: int | None = None
    max_line_bytes: int = 32 << 20
    report: str | None = None
    trace: str | None = None


class Outcome(msgspec.Struct):
    """How the loop ended: by itself, by a signal, or by a failure."""

    end: End = End.INTERRUPTED
    failure: EnginePoolError | None = None
    signal_code: int = ExitCode.INTERRUPTED
    model: str = ""
    endpoint: str = ""
    num_written: int = 0


def close(args: BatchArguments, progress: Progress, ledger: RunLedger, outcome: Outcome, failed_before: int) -> int:
    """Report, summary, and how to go on."""
    if outcome.end is End.COMPLETE and progress.earlier is not None:
        progress.earlier.remove()
    if args.report is not None:
        _write_report(args.report, args, outcome, ledger)
    for text in [*summary_lines(ledger), *_first_failures(ledger, "output" if args.error_file is None else "error file")]:
        say(text)
    if outcome.failure is not None:
        if not (isinstance(outcome.failure, OutputFailed) and outcome.failure.is_closed_pipe):
            say(f"error: {outcome.failure}")
        code: int = outcome.failure.exit_code
    elif outcome.end is End.COMPLETE:
        return code_of_lines(ledger.num_lines, ledger.failed + failed_before)
    elif outcome.end is End.POOL_STOPPED:
        say("the pool was stopped and gave back what it had not finished")
        code = ExitCode.NO_DISPATCHER
    else:
        code = outcome.signal_code
    if not isinstance(outcome.failure, CallerError):
        say(_how_to_go_on(args, ledger, outcome))
    return code


def _first_failures(ledger: RunLedger, where: str) -> list[str]:
    """What went wrong, for whoever reads only this."""
    told = [f"line {one.line}: {one.code}: {one.message:.300}" for one in ledger.failures[:MOST_FAILURES]]
    rest = ledger.failed - len(told)
    return [*told, f"and {plural(rest, 'more failed line')}; each says why in the {where}"] if rest > 0 else told


def _how_to_go_on(args: BatchArguments, ledger: RunLedger, outcome: Outcome) -> str:
    left = ledger.num_lines - ledger.skipped - outcome.num_written  # what has ended and could not be written is left too
    lines = f"{left:,} line{'s are' if left != 1 else ' is'} left"
    if not target.is_file_or_new(args.output_file):
        name = "standard output" if args.output_file == target.STDOUT else args.output_file
        return f"{lines}; what went to {name} can't be continued from there"
    return f"{lines}; the same command goes on from here"


def code_of_lines(num_lines: int, num_failed: int) -> int:
    """The exit code of a run that is through."""
    if not num_failed:
        return ExitCode.OK
    return ExitCode.ALL_LINES_FAILED if num_failed == num_lines else ExitCode.FAILED


def _write_report(path: str, args: BatchArguments, outcome: Outcome, ledger: RunLedger) -> None:
    from enginepool import __version__
    from enginepool.batch.report import write_report

    facts = {
        "model": outcome.model,
        "endpoint": outcome.endpoint,
        "command": shlex.join(["enginepool", *sys.argv[1:]]),
        "versions": f"enginepool {__version__}, Python {platform.python_version()}",
        "input": f"{args.input_file}, {plural(ledger.num_lines, 'line')}",
        "output": args.output_file,
    }
    try:
        write_report(Path(path), ledger, facts)
    except OSError as error:
        say(f"report {path}: {error.strerror}")

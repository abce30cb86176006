"""`enginepool run-batch` from its arguments to its exit code: everything that can be refused is, before an engine is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from enginepool.batch import target
from enginepool.batch.answers import LineWriter
from enginepool.batch.earlier import FAILED, OK
from enginepool.batch.feed import Entry, entries
from enginepool.batch.index import Index, index_input
from enginepool.batch.interrupts import Interrupts
from enginepool.batch.ledger import RunLedger
from enginepool.batch.lines import InputFile
from enginepool.batch.outbox import Outbox
from enginepool.batch.progress import make_batch_view, summary_lines
from enginepool.batch.resume import Policy, Progress, begin, begin_stream
from enginepool.batch.run import BatchRun, End, Options
from enginepool.batch.target import OutputFailed, Target
from enginepool.batch.trace import TraceWriter
from enginepool.batch.watch import RunWatch, say
from enginepool.client.pool import Pool
from enginepool.clock import monotonic
from enginepool.errors import EnginePoolError, ExitCode, InvalidRequest

INDEXING_AFTER_S = 2.0


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


class PoolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The pool that a run uses: `join` connects or starts it, `settings` are those that matter for the answers."""

    join: Callable[[], Pool]
    settings: Mapping[str, Any]
    is_own: bool


class Outcome(msgspec.Struct):
    """How the loop ended: by itself, by a signal, or by a failure."""

    end: End = End.INTERRUPTED
    failure: EnginePoolError | None = None
    signal_code: int = ExitCode.INTERRUPTED


def run_batch(args: BatchArguments, choice: PoolChoice) -> int:
    """Run a batch file; returns the exit code. Raises SettingsError before anything is started, and what starting a pool raises."""
    source = _check_files(args)
    index = index_input(source, _indexing_told())
    progress = _begin(args, choice, index)
    for note in progress.notes:
        say(note)
    ledger = RunLedger(index.num_requests, time.time())
    failed_before = progress.count(FAILED)
    ledger.skip(progress.count(OK) + failed_before)
    with ExitStack() as stack:
        if progress.journal is not None:
            stack.callback(progress.journal.close)
        out, errors = _opened(stack, args.output_file), _opened(stack, args.error_file)
        assert out is not None
        if not _is_done(args, progress, index):
            outbox = Outbox(out, errors, is_ordered=args.is_ordered)
            outcome = _run(args, choice, entries(source, progress, args.max_line_bytes), progress, ledger, outbox)
            return _close(args, choice, progress, ledger, outcome, failed_before)
    return _code_of_lines(index.num_requests, failed_before)


def _is_done(args: BatchArguments, progress: Progress, index: Index) -> bool:
    """Whether there is nothing to run, and so no engine to load."""
    num_failed = progress.count(FAILED)
    if progress.count(OK) + num_failed < index.num_requests or progress.earlier is not None:
        return False
    if not index.num_requests:
        say(f"input {args.input_file} has no lines: the output is empty, and no engine was started")
        return True
    failed = f", {num_failed} of them failed (--retry-failed tries those again)" if num_failed else ""
    say(f"nothing to do: all {index.num_requests} lines are done{failed}")
    return True


def _check_files(args: BatchArguments) -> InputFile:
    names = {"input": args.input_file, "output": args.output_file, "error file": args.error_file}
    journal = None if not target.is_file_or_new(args.output_file) else f"{target.resolve(args.output_file)}.journal"
    target.check_distinct(names | {"journal": journal, "report": args.report, "trace": args.trace})
    for role, name in (("output", args.output_file), ("error file", args.error_file), ("report", args.report), ("trace", args.trace)):
        target.check_folder(role, name)
    if args.retry_failed and journal is None:
        raise InvalidRequest("--retry-failed needs an output that is a file")
    return InputFile(Path(args.input_file), args.max_line_bytes)


def _indexing_told() -> Callable[[int], None]:
    """Says that a large input is being checked, once that takes long."""
    told_at = monotonic() + INDEXING_AFTER_S
    is_told = False

    def on_line(number: int) -> None:
        nonlocal is_told
        if not is_told and number % 10_000 == 0 and monotonic() > told_at:
            is_told = True
            say(f"checking the input ({number:,} lines so far)")

    return on_line


def _begin(args: BatchArguments, choice: PoolChoice, index: Index) -> Progress:
    if not target.is_file_or_new(args.output_file):
        return begin_stream(index)
    errors = None if args.error_file is None else Path(target.resolve(args.error_file))
    form = {"ordered": args.is_ordered, "plain": args.is_plain, "strict": args.is_strict}
    settings = {**choice.settings, **form, "error_file": None if errors is None else str(errors)}
    policy = Policy(is_ordered=args.is_ordered, retry_failed=args.retry_failed, force=args.force, overwrite=args.overwrite)
    return begin(args.input_file, Path(target.resolve(args.output_file)), errors, index, settings, policy)


def _opened(stack: ExitStack, name: str | None) -> Target | None:
    if name is None:
        return None
    opened = Target(target.resolve(name))
    stack.callback(opened.close)
    return opened


def _run(args: BatchArguments, choice: PoolChoice, feed: Iterator[Entry], progress: Progress, ledger: RunLedger, outbox: Outbox) -> Outcome:
    lines = LineWriter(progress.run, is_plain=args.is_plain)
    outcome = Outcome()
    with ExitStack() as stack:
        trace = None if args.trace is None else stack.enter_context(TraceWriter(args.trace, say))
        pool = stack.enter_context(choice.join())
        view = make_batch_view(ledger.num_lines, quiet=args.quiet)
        options = Options(window=args.window, priority=args.priority, is_strict=args.is_strict, is_ordered=args.is_ordered)
        run = BatchRun(pool._connection, feed, outbox, lines, RunWatch(ledger, view, trace), options)
        ledger.started_wall = time.time()
        with Interrupts(run.wake) as interrupts:
            view.open()
            try:
                outcome.end = run.run(interrupts)
            except EnginePoolError as error:
                outcome.failure = error
            finally:
                view.close()
            outcome.signal_code = interrupts.exit_code
        ledger.finish(time.time())
    return outcome


def _close(args: BatchArguments, choice: PoolChoice, progress: Progress, ledger: RunLedger, outcome: Outcome, failed_before: int) -> int:
    """Report, summary, and how to go on."""
    if outcome.end is End.COMPLETE and progress.earlier is not None:
        progress.earlier.remove()
    if args.report is not None:
        _write_report(args.report, args, choice, ledger)
    for text in summary_lines(ledger):
        say(text)
    if outcome.failure is not None:
        if not (isinstance(outcome.failure, OutputFailed) and outcome.failure.is_closed_pipe):
            say(f"error: {outcome.failure}")
        code: int = outcome.failure.exit_code
    elif outcome.end is End.COMPLETE:
        return _code_of_lines(ledger.num_lines, ledger.failed + failed_before)
    elif outcome.end is End.POOL_STOPPED:
        say("the pool was stopped and gave back what it had not finished")
        code = ExitCode.NO_DISPATCHER
    else:
        code = outcome.signal_code
    say(_how_to_go_on(args, ledger))
    return code


def _how_to_go_on(args: BatchArguments, ledger: RunLedger) -> str:
    left = ledger.num_lines - ledger.done
    lines = f"{left:,} line{'s are' if left != 1 else ' is'} left"
    if not target.is_file_or_new(args.output_file):
        return f"{lines}; what went to {args.output_file} can't be continued from there"
    return f"{lines}; the same command goes on from here"


def _code_of_lines(num_lines: int, num_failed: int) -> int:
    if not num_failed:
        return ExitCode.OK
    return ExitCode.ALL_LINES_FAILED if num_failed == num_lines else ExitCode.FAILED


def _write_report(path: str, args: BatchArguments, choice: PoolChoice, ledger: RunLedger) -> None:
    from enginepool.batch.report import write_report

    facts = {"input": args.input_file, "output": args.output_file, **{name: str(value) for name, value in choice.settings.items()}}
    try:
        write_report(Path(path), ledger, facts)
    except OSError as error:
        say(f"report {path}: {error.strerror}")

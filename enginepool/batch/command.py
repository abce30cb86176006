"""`enginepool run-batch` from its arguments to its exit code: everything that can be refused is, before an engine is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from enginepool.batch import target
from enginepool.batch.answers import LineWriter
from enginepool.batch.closing import BatchArguments, Outcome, close, code_of_lines
from enginepool.batch.earlier import FAILED, OK
from enginepool.batch.feed import Entry, entries
from enginepool.batch.index import Index, index_input
from enginepool.batch.interrupts import Interrupts
from enginepool.batch.ledger import RunLedger
from enginepool.batch.lines import InputFile
from enginepool.batch.merge import merged_path
from enginepool.batch.outbox import Outbox
from enginepool.batch.progress import make_batch_view
from enginepool.batch.resume import Policy, Progress, begin, begin_stream, journal_path
from enginepool.batch.run import BatchRun, Options
from enginepool.batch.standard import settle_standard_streams
from enginepool.batch.target import OutputFailed, Target
from enginepool.batch.trace import TraceWriter
from enginepool.batch.watch import RunWatch, say
from enginepool.client.pool import Pool
from enginepool.clock import monotonic
from enginepool.errors import EnginePoolError, InvalidRequest

INDEXING_AFTER_S = 2.0


class PoolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The pool that a run uses: `join` connects or starts it, `leave` lets it go, `settings` are those that matter for the answers."""

    join: Callable[[], Pool]
    leave: Callable[[Pool], None]
    settings: Mapping[str, Any]


def run_batch(args: BatchArguments, choice: PoolChoice) -> int:
    """Run a batch file; returns the exit code. Raises SettingsError before anything is started, and what starting a pool raises."""
    settle_standard_streams()
    source = _check_files(args)
    try:
        with closing(index_input(source, _indexing_told())) as index:
            return _run_indexed(args, choice, source, index)
    except KeyboardInterrupt:
        say("interrupted before any line was run; the same command begins again")
        raise


def _run_indexed(args: BatchArguments, choice: PoolChoice, source: InputFile, index: Index) -> int:
    progress = _begin(args, choice, index)
    for note in progress.notes:
        say(note)
    ledger = RunLedger(index.num_requests, time.time())
    failed_before = progress.count(FAILED)
    ledger.skip(progress.count(OK) + failed_before, failed_before)
    with ExitStack() as stack:
        if progress.journal is not None:
            stack.callback(progress.journal.close)
        out, errors = _opened(stack, args.output_file), _opened(stack, args.error_file)
        assert out is not None
        if not _is_done(args, progress, index):
            outbox = Outbox(out, errors, is_ordered=args.is_ordered)
            feed = entries(source, index, progress, args.max_line_bytes)
            prepared = _Prepared(feed, LineWriter(progress.run, is_plain=args.is_plain), outbox, _options(args, index))
            if ledger.done:
                say(f"{ledger.done:,} of {index.num_requests:,} lines are done already")
            outcome = _run(args, choice, prepared, ledger, stack)
            return close(args, progress, ledger, outcome, failed_before)
    return code_of_lines(index.num_requests, failed_before)


def _is_done(args: BatchArguments, progress: Progress, index: Index) -> bool:
    """Whether there is nothing to run, and so no engine to load."""
    num_failed = progress.count(FAILED)
    if progress.count(OK) + num_failed < index.num_requests:
        return False
    if not index.num_requests:
        say(f"input {args.input_file} has no lines: the output is empty, and no engine was started")
        return True
    if args.report is not None or args.trace is not None:
        say("no report and no trace is written, since nothing is run")
    failed = f", {num_failed} of them failed (--retry-failed tries those again)" if num_failed else ""
    say(f"nothing to do: all {index.num_requests} lines are done{failed}")
    return True


def _check_files(args: BatchArguments) -> InputFile:
    names = {"input": args.input_file, "output": args.output_file, "error file": args.error_file}
    own = Path(target.resolve(args.output_file)) if target.is_file_or_new(args.output_file) else None
    beside = {} if own is None else {"the journal of the output": str(journal_path(own)), "a file of the run's": str(merged_path(own))}
    target.check_distinct(names | beside | {"report": args.report, "trace": args.trace})
    for role, name in (("output", args.output_file), ("error file", args.error_file), ("report", args.report), ("trace", args.trace)):
        target.check_folder(role, name)
    if args.output_file.endswith((".gz", ".zst", ".bz2", ".xz")):
        raise InvalidRequest(f"output {args.output_file}: results are written uncompressed; leave the ending out")
    if args.retry_failed and own is None:
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
        return begin_stream(index, _error_path(args), overwrite=args.overwrite)
    out, errors = Path(target.resolve(args.output_file)), _error_path(args)
    form = {"ordered": args.is_ordered, "plain": args.is_plain, "strict": args.is_strict}
    settings = {**choice.settings, **form, "error_file": None if errors is None else os.path.relpath(errors, out.parent)}
    policy = Policy(is_ordered=args.is_ordered, retry_failed=args.retry_failed, force=args.force, overwrite=args.overwrite)
    return begin(args.input_file, out, errors, index, settings, policy)


def _error_path(args: BatchArguments) -> Path | None:
    is_file = args.error_file is not None and target.is_file_or_new(args.error_file)
    return Path(target.resolve(args.error_file)) if is_file and args.error_file is not None else None


def _opened(stack: ExitStack, name: str | None) -> Target | None:
    if name is None:
        return None
    opened = Target(target.resolve(name))
    stack.callback(opened.close)
    return opened


def _options(args: BatchArguments, index: Index) -> Options:
    return Options(
        window=args.window,
        priority=args.priority,
        is_strict=args.is_strict,
        is_ordered=args.is_ordered,
        is_all_chat=index.num_chats == index.num_requests,
    )


class _Prepared(msgspec.Struct):
    """What a run needs beside a pool."""

    feed: Iterator[Entry]
    lines: LineWriter
    outbox: Outbox
    options: Options


def _run(args: BatchArguments, choice: PoolChoice, prepared: _Prepared, ledger: RunLedger, until_closed: ExitStack) -> Outcome:
    """Signals stay counted until the end has been told: one that comes late must not cut that off."""
    outcome = Outcome()
    with ExitStack() as stack:
        trace = None if args.trace is None else stack.enter_context(TraceWriter(args.trace, say))
        pool = choice.join()
        stack.callback(choice.leave, pool)
        outcome.model, outcome.endpoint = pool.model, pool.endpoint
        view = make_batch_view(ledger.num_lines, quiet=args.quiet)
        watch = RunWatch(ledger, view, trace)
        run = BatchRun(pool._connection, prepared.feed, prepared.outbox, prepared.lines, watch, prepared.options)
        ledger.started_wall = time.time()
        interrupts = until_closed.enter_context(Interrupts(run.wake))
        with watch.shown():
            try:
                outcome.end = run.run(interrupts)
            except EnginePoolError as error:
                is_given_up = isinstance(error, OutputFailed) and interrupts.count > 1  # nobody read it, and the user is gone too
                outcome.failure = None if is_given_up else error
            outcome.signal_code = interrupts.exit_code
        outcome.num_written = prepared.outbox.num_written
        ledger.finish(time.time())
    return outcome

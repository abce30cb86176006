"""Begins a run or continues an earlier one: journal, what is done already, and the files to append to."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from enginepool.batch.carry import carry_over, finish_carrying
from enginepool.batch.earlier import FAILED, OK, OPEN, drop_torn_tail, read_results, rewrite, take_place
from enginepool.batch.file_lock import check_free
from enginepool.batch.index import Index
from enginepool.batch.journal import Claim, Header, Journal
from enginepool.batch.merge import Earlier, gather, merged_path
from enginepool.errors import SettingsError


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller wants done with an earlier run's results."""

    is_ordered: bool = False
    retry_failed: bool = False
    force: bool = False
    overwrite: bool = False


class Progress(msgspec.Struct):
    """How far the run is: a state for each physical line (index 0 is not used), and in ordered runs the results to be merged in."""

    run: str
    states: bytearray
    journal: Journal | None = None
    earlier: Earlier | None = None
    notes: list[str] = []

    def count(self, state: int) -> int:
        """How many lines are in a state."""
        return self.states.count(state)


def journal_path(out: Path) -> Path:
    """Where the journal of an output lies."""
    return out.with_name(f"{out.name}.journal")


def begin_stream(index: Index, errors: Path | None = None, *, overwrite: bool = False) -> Progress:
    """A run whose results can't be read again. Raises SettingsError where an error file has lines of another run."""
    if errors is not None:
        check_free(errors)
        if not overwrite:
            _refuse_foreign([errors], None)
        errors.unlink(missing_ok=True)
    return Progress(secrets.token_hex(6), bytearray(index.num_lines + 1))


def begin(source: str, out: Path, errors: Path | None, index: Index, settings: dict[str, Any], policy: Policy) -> Progress:
    """Begin anew or continue what stands in `out`. Raises SettingsError where that would mix what does not belong together."""
    plain = msgspec.json.decode(msgspec.json.encode(settings))  # as they will be read back
    fresh = Header(secrets.token_hex(6), source, index.num_lines, index.num_requests, index.fingerprint, plain)
    outputs = [file for file in (out, errors) if file is not None]
    path = journal_path(out)
    with ExitStack() as stack, Claim(path) as claim:
        for file in outputs:
            check_free(file)
        journal = Journal.open(path)
        if journal is not None:
            stack.callback(journal.close)
        if policy.overwrite or journal is None or _is_without_results([*outputs, merged_path(out)]):
            if not policy.overwrite:
                _refuse_foreign([*outputs, merged_path(out)], path)
            progress = Progress(fresh.run, bytearray(index.num_lines + 1), _anew(claim, fresh, index, outputs))
        else:
            progress = _continue(journal, claim, fresh, index, outputs, policy)
        if progress.journal is journal:
            stack.pop_all()
    return progress


def _continue(journal: Journal, claim: Claim, fresh: Header, index: Index, outputs: list[Path], policy: Policy) -> Progress:
    finish_carrying(journal.header, outputs)
    files = [*outputs, merged_path(outputs[0])]
    notes = [f"{file} ended in the middle of a line; {torn} bytes were cut off" for file in files if (torn := drop_torn_tail(file))]
    changes = _changes(journal, fresh, index, outputs[0], policy)
    if changes:
        notes += [f"forced: {change}" for change in changes]
        journal = carry_over(journal, claim, fresh, index, outputs)
    progress = Progress(journal.header.run, bytearray(index.num_lines + 1), journal, None, notes)
    try:
        _settle(progress, outputs, index, policy, has_moved=bool(changes))
    except BaseException:
        journal.close()
        raise
    return progress


def _refuse_foreign(files: list[Path], journal: Path | None) -> None:
    for file in files:
        with suppress(FileNotFoundError):
            if file.stat().st_size:
                why = "" if journal is None else f", without the journal ({journal}) that would tell what it holds"
                raise SettingsError(f"output {file} is there already{why}; name another one, or give --overwrite to begin anew")


def _is_without_results(files: list[Path]) -> bool:
    """Whether there is nothing that could be mixed up: then input and settings may be others."""
    return not any(file.exists() and file.stat().st_size for file in files)


def _anew(claim: Claim, header: Header, index: Index, outputs: list[Path]) -> Journal:
    """The old results go before the new journal comes: a journal never stands beside results of another run."""
    for file in [*outputs, merged_path(outputs[0])]:
        file.unlink(missing_ok=True)
    return Journal.create(claim, header, index)


def _changes(journal: Journal, fresh: Header, index: Index, out: Path, policy: Policy) -> list[str]:
    """What is not as it was; raises SettingsError unless the caller forces it."""
    changes = journal.settings_changes(fresh.settings)
    difference = journal.input_changes(index)
    if difference:
        changes.insert(0, f"the input is not the one that {out} was begun with: {difference}")
    if changes and not policy.force:
        way_out = "go on with the same, name another output, give --force to keep what still fits, or --overwrite to begin anew"
        raise SettingsError(f"{'; '.join(changes)}; {way_out}")
    return changes


def _settle(progress: Progress, outputs: list[Path], index: Index, policy: Policy, *, has_moved: bool) -> None:
    """Read what is done; take out what is to be tried again."""
    out, *errors = outputs
    merged = merged_path(out)
    num_failed = _note_states(progress, [*outputs, merged])
    retries = policy.retry_failed and num_failed
    is_merging = policy.is_ordered and (retries or has_moved or merged.exists())
    for file in (errors if is_merging else outputs) if retries else ():
        rewrite(file, progress.run, lambda result: None if result.is_failed else result.number)
    if retries:
        progress.states = progress.states.replace(bytes([FAILED]), bytes([OPEN]))
    if is_merging:
        gather(out, merged, drop_failed=bool(retries))
        if progress.count(OK) + progress.count(FAILED) == index.num_requests:
            take_place(merged, out)
        else:
            progress.earlier = Earlier(merged)


def _note_states(progress: Progress, files: list[Path]) -> int:
    for file in files:
        for result in read_results(file):
            if result.run != progress.run or not 0 < result.number < len(progress.states):
                raise SettingsError(f"{file} holds a result of another run (id of line {result.number}); --overwrite begins anew")
            progress.states[result.number] = FAILED if result.is_failed else OK
    return progress.count(FAILED)

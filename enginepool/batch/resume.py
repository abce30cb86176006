"""Begins a run or continues an earlier one: journal, what is done already, and the files to append to."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from enginepool.batch.carry import carry_over, finish_carrying
from enginepool.batch.earlier import FAILED, OK, OPEN, drop_torn_tail, read_results, rewrite
from enginepool.batch.index import Index
from enginepool.batch.journal import Header, Journal
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


def begin_stream(index: Index) -> Progress:
    """A run whose results can't be read again."""
    return Progress(secrets.token_hex(6), bytearray(index.num_lines + 1))


def begin(source: str, out: Path, errors: Path | None, index: Index, settings: dict[str, Any], policy: Policy) -> Progress:
    """Begin anew or continue what stands in `out`. Raises SettingsError where that would mix what does not belong together."""
    path = out.with_name(f"{out.name}.journal")
    journal = Journal.open(path)
    outputs = [file for file in (out, errors) if file is not None]
    fresh = Header(secrets.token_hex(6), source, index.num_lines, index.num_requests, index.fingerprint, settings)
    if policy.overwrite or journal is None:
        if not policy.overwrite:
            _refuse_foreign(outputs, path)
        journal = _anew(path, fresh, index, outputs, journal)
        return Progress(journal.header.run, bytearray(index.num_lines + 1), journal)
    finish_carrying(journal.header, outputs)
    notes = [f"{file} ended in the middle of a line; {torn} bytes were cut off" for file in outputs if (torn := drop_torn_tail(file))]
    changes = _changes(journal, fresh, index, out, policy)
    if changes:
        notes += [f"forced: {change}" for change in changes]
        journal = carry_over(journal, fresh, index, outputs, in_place=policy.is_ordered)
    progress = Progress(journal.header.run, bytearray(index.num_lines + 1), journal, None, notes)
    _settle(progress, out, errors, policy, has_gaps=bool(changes))
    return progress


def _refuse_foreign(outputs: list[Path], path: Path) -> None:
    for file in outputs:
        with suppress(FileNotFoundError):
            if file.stat().st_size:
                raise SettingsError(
                    f"output {file} is there already, without the journal ({path}) that would tell what it holds; "
                    "name another one, or give --overwrite to begin anew"
                )


def _anew(path: Path, header: Header, index: Index, outputs: list[Path], old: Journal | None) -> Journal:
    """The old results go before the new journal comes: a journal never stands beside results of another run."""
    for file in [*outputs, merged_path(outputs[0])]:
        file.unlink(missing_ok=True)
    journal = Journal.create(path, header, index)
    if old is not None:
        old.close()
    return journal


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


def _settle(progress: Progress, out: Path, errors: Path | None, policy: Policy, *, has_gaps: bool) -> None:
    """Read what is done; take out what is to be tried again."""
    merged = merged_path(out)
    num_failed = _note_states(progress, [file for file in (out, errors, merged) if file is not None])
    retries = policy.retry_failed and num_failed
    if policy.is_ordered and (retries or has_gaps or merged.exists()):
        gather(out, merged, drop_failed=bool(retries))
        if errors is not None and retries:
            rewrite(errors, progress.run, lambda result: None if result.is_failed else result.number)
        progress.earlier = Earlier(merged)
    elif retries:
        for file in (out, errors):
            if file is not None:
                rewrite(file, progress.run, lambda result: None if result.is_failed else result.number)
    if retries:
        progress.states = progress.states.replace(bytes([FAILED]), bytes([OPEN]))


def _note_states(progress: Progress, files: list[Path]) -> int:
    for file in files:
        for result in read_results(file):
            if result.run != progress.run or not 0 < result.number < len(progress.states):
                raise SettingsError(f"{file} holds a result of another run (id of line {result.number}); --overwrite begins anew")
            progress.states[result.number] = FAILED if result.is_failed else OK
    return progress.count(FAILED)

"""Scratch folders go with their worker, and a later dispatcher sweeps what a killed one left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginepool import Pool
from enginepool.dispatcher.scratch import make_scratch, remove_scratch, sweep_scratch


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_sweep_removes_only_what_dead_dispatchers_left(tmp_path: Path) -> None:
    mine = make_scratch(tmp_path)
    left = tmp_path / f"enginepool-{_dead_pid()}-wabc"
    (left / "inside").mkdir(parents=True)
    (tmp_path / "enginepool-0").mkdir()
    (tmp_path / "enginepool-notes-work").mkdir()
    assert sweep_scratch(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, "enginepool-0", "enginepool-notes-work"])


def test_scratch_is_private_and_removed_whole(tmp_path: Path) -> None:
    folder = make_scratch(tmp_path)
    (folder / "socket").touch()
    assert folder.stat().st_mode & 0o777 == 0o700
    remove_scratch(folder)
    assert not folder.exists()


def test_pool_leaves_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Pool(engine="echo", workers=2):
        assert len(list(tmp_path.glob("enginepool-*-w*"))) == 2
    assert list(tmp_path.glob("enginepool-*-w*")) == []


def test_sweep_beside_another_one_does_not_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one removes each folder between the look at its name and the look at its owner."""
    folder = tmp_path / "enginepool-99999999-wabc"
    folder.mkdir()
    lstat = Path.lstat

    def removed_first(path: Path) -> os.stat_result:
        if path == folder and folder.exists():
            folder.rmdir()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removed_first)
    assert sweep_scratch(tmp_path) == 0

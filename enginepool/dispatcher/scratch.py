"""Scratch folders: where a worker's engine puts its sockets, so that a killed one's can be removed.

vLLM makes them in the temp folder and a killed process leaves them there. Each worker gets a folder of its own, removed
when the worker is reaped; what a killed dispatcher left is swept by the next one of the same user.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"^enginepool-(\d+)-w")


def make_scratch(temp: Path | None = None) -> Path:
    """A new private folder that carries this process's id in its name."""
    return Path(tempfile.mkdtemp(prefix=f"enginepool-{os.getpid()}-w", dir=temp))


def remove_scratch(folder: Path) -> None:
    """Remove a folder with all that a worker left in it."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep_scratch(temp: Path | None = None) -> int:
    """Remove folders of this user's dispatchers that no longer live; returns how many."""
    count = 0
    for folder in Path(temp or tempfile.gettempdir()).glob("enginepool-*-w*"):
        match = _NAME.match(folder.name)
        if match and not Path(f"/proc/{match[1]}").exists() and _is_mine(folder):
            remove_scratch(folder)
            count += 1
    return count


def _is_mine(folder: Path) -> bool:
    """Another dispatcher may just be sweeping it."""
    try:
        return folder.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False

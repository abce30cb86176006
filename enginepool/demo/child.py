"""Run a child quietly and tell how it ended; its output is shown only when it failed. It does not outlive this process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing

from enginepool.lifeline import GroupTie

_TAIL_LINES = 12


def run_quietly(argv: Sequence[str], lock: int, env: Mapping[str, str] | None = None) -> str | None:
    """Run `argv` to its end and return None, or how it failed with the end of its output.

    `lock` is a file descriptor the child inherits, so that a lock on it holds until both have gone; `env` is added to ours.
    """
    with subprocess.Popen(
        argv,
        env=os.environ | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        process_group=0,
    ) as child:
        try:
            with closing(GroupTie(child.pid)):
                output, _ = child.communicate()
        except BaseException:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode == 0:
        return None
    return f"{describe_exit(child.returncode)}; the end of its output:\n{tail(output)}"


def describe_exit(returncode: int) -> str:
    """Say how a child ended: its exit code, or the name of the signal (and a guess at who sent SIGKILL)."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


def tail(output: bytes) -> str:
    """Return the last lines of a child's output, indented; a progress bar's carriage returns count as line ends."""
    lines = [line.rstrip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (it printed nothing)"

"""Ties between processes, each by itself: the parent-death signal, a group's tie, and the signal at the end of a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import is_alive, wait_for, wait_for_end

from enginepool import lifeline

FAMILY = "trap '' TERM HUP INT; sleep 600 & echo $$ $!; wait"
HOLDER = f"""
import os, signal, subprocess, sys, time
from enginepool.lifeline import GroupTie
group = subprocess.Popen(["sh", "-c", {FAMILY!r}], process_group=0, stdout=subprocess.PIPE, text=True)
line = group.stdout.readline()
tie = GroupTie(group.pid)
exec(sys.argv[1])
print(line, end="", flush=True)
exec(sys.argv[2])
"""
WAIT = "time.sleep(600)"


class Holder:
    """A process that holds a group of two by a tie; `before` it tells their pids and `after` it does this."""

    def __init__(self, before: str = "pass", after: str = WAIT) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", HOLDER, before, after], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.leader, self.member = map(int, self.process.stdout.readline().split())

    @property
    def living(self) -> list[int]:
        """Who of the group lives."""
        return [pid for pid in (self.leader, self.member) if is_alive(pid)]

    def end(self) -> None:
        """End the holder, and the group if it still lives."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.living:
            os.killpg(self.leader, signal.SIGKILL)
            wait_for_end([self.leader, self.member])


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    """What is put here is ended."""
    made: list[Holder] = []
    yield made
    for holder in made:
        holder.end()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", id="SIGKILL"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", id="SIGSEGV"),
        pytest.param("os._exit(3)", id="exit"),
        pytest.param("pass", id="end of the script"),
        pytest.param("os.execv('/bin/true', ['true'])", id="another program in its place"),
    ],
)
def test_group_ends_with_the_holder_of_its_tie(holders: list[Holder], way: str) -> None:
    holders.append(Holder(after=way))
    wait_for(lambda: not holders[0].living, "the end of the group", 5)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("os.killpg(group.pid, signal.SIGSTOP)", id="all stopped"),
        pytest.param("os.kill(group.pid, signal.SIGKILL)", id="leader dead"),
        pytest.param("os.kill(group.pid, signal.SIGKILL); group.wait()", id="leader reaped"),
        pytest.param("[os.dup(0) for _ in range(50)]; GroupTie(os.getpid()).close()", id="many descriptors"),
    ],
)
def test_group_in_any_state_ends_with_its_holder(holders: list[Holder], before: str) -> None:
    holders.append(Holder(before))
    assert is_alive(holders[0].member)
    holders[0].process.kill()
    wait_for(lambda: not holders[0].living, "the end of the group", 5)


def test_group_that_was_let_go_outlives_the_holder(holders: list[Holder]) -> None:
    holders.append(Holder("tie.close()"))
    holders[0].process.kill()
    holders[0].process.wait()
    assert holders[0].living == [holders[0].leader, holders[0].member]


def test_tie_that_was_closed_keeps_no_descriptor() -> None:
    before = psutil.Process().num_fds()
    tie = lifeline.GroupTie(os.getpgrp())
    tie.close()
    assert psutil.Process().num_fds() == before


def test_armed_process_ends_with_its_parent() -> None:
    child = (
        "import os, time; from enginepool import lifeline; lifeline.arm(int(os.environ['PARENT']))\n"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time; os.environ['PARENT'] = str(os.getpid())\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for_end([pid])


def test_process_that_arms_after_its_parents_end_leaves_at_once() -> None:
    code = "from enginepool import lifeline; lifeline.arm(1 << 22); print('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_end_of_a_pipe_wakes_a_stopped_process() -> None:
    code = (
        "import os, signal, sys; from enginepool import lifeline\n"
        "lifeline.signal_at_end(0, signal.SIGCONT, os.getpid())\n"
        "print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP); print('awake', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop")
    process.stdin.close()
    assert process.stdout.readline() == "awake\n"
    assert process.wait(5) == 0
    process.stdout.close()


def test_what_is_no_pipe_is_no_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        lifeline.signal_at_end(file.fileno(), signal.SIGCONT, os.getpid())

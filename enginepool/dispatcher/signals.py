"""Signals and the parent's death as descriptors the loop can poll; nothing happens inside a handler."""

from __future__ import annotations

import os
import signal
from typing import Literal

from enginepool import lifeline

Event = Literal["none", "drain", "kill", "parent gone"]


class Signals:
    """SIGTERM, SIGHUP and the first SIGINT drain, the second SIGINT kills; a parent that dies ends everything at once.

    `parent_pid` is watched by pidfd (a parent-death signal would follow the parent's thread, not the process) and
    `lifeline_fd` by end of file, at which the kernel also wakes a dispatcher that was stopped; an embedded one leaves SIGINT
    to its host.
    """

    def __init__(self, parent_pid: int | None = None, lifeline_fd: int | None = None, *, ignore_sigint: bool = False) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_sigint else lambda *_: None)
        self._num_interrupts = 0
        self._lifeline_fd = lifeline_fd
        self._is_orphan = False
        self._parent_fd: int | None = None
        if lifeline_fd is not None:
            lifeline.signal_at_end(lifeline_fd, signal.SIGCONT, os.getpid())
        if parent_pid is not None:
            self._watch_parent(parent_pid)

    @property
    def fds(self) -> list[int]:
        """What to poll."""
        return [fd for fd in (self._read_fd, self._parent_fd, self._lifeline_fd) if fd is not None]

    def read(self) -> Event:
        """What has happened since the last call; the gravest first."""
        try:
            numbers = os.read(self._read_fd, 4096)
        except BlockingIOError:
            numbers = b""
        if self._is_orphan or not numbers:
            return "parent gone"
        self._num_interrupts += numbers.count(signal.SIGINT)
        if self._num_interrupts >= 2:
            return "kill"
        wanted = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
        return "drain" if wanted & set(numbers) else "none"

    def _watch_parent(self, parent_pid: int) -> None:
        try:
            self._parent_fd = os.pidfd_open(parent_pid)
        except OSError:
            self._is_orphan = True
        if os.getppid() != parent_pid:
            self._is_orphan = True
        if self._is_orphan:
            os.write(self._write_fd, b"\0")

"""Ties processes to their parent: when it dies, however it dies, the kernel kills them.

`arm` ties one process, to the thread that started it. The dispatcher arms a worker between fork and exec (the request survives
exec), so that no moment of the interpreter's start is left out. The worker's engine-core children arm it for themselves: vLLM's
spawn runs `enginepool.worker.main` again in them under the name `__mp_main__`.

`GroupTie` ties a whole process group, whatever its members know of it: compilers and other programs that a worker has started.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def arm(expected_parent: int | None = None) -> None:
    """Ask for SIGKILL at the parent's death; exit at once when it died before we could ask."""
    parent = os.getppid() if expected_parent is None else expected_parent
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def signal_at_end(fd: int, number: signal.Signals, receiver: int) -> None:
    """Have the kernel send a signal when the last writer of the pipe behind `fd` has gone.

    `receiver` is a pid, or a group's number made negative; the kernel holds on to it, so no other process ever gets the signal.
    That is `O_ASYNC` of fcntl(2): a signal whenever there is news, and nobody writes to these pipes. A kernel that can't do it
    (not every sandbox can) is no error.
    """
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETOWN, receiver)
        fcntl.fcntl(fd, fcntl.F_SETSIG, number)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


class GroupTie:
    """Until `close`, the end of this process sends SIGKILL to the group.

    The pipe is this process's own. A reader that is closed before the writer hears nothing, and kernels close a dead process's
    descriptors in one order or the other: so there is a reader on either side of the writer's number.
    """

    def __init__(self, pgid: int) -> None:
        lower, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._readers = [lower]
        try:
            self._readers.append(os.open(f"/proc/self/fd/{lower}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            for fd in self._readers:
                signal_at_end(fd, signal.SIGKILL, -pgid)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the group: the readers first, or it would be killed now."""
        for fd in (*self._readers, self._writer):
            os.close(fd)

"""Ties a process to its parent: when the parent's thread that started it dies, however it dies, the kernel kills it.

The dispatcher arms it in a worker between fork and exec (the request survives exec), so that no moment of the
interpreter's start is left out. The worker's engine-core children arm it for themselves: vLLM's spawn runs
`enginepool.worker.main` again in them under the name `__mp_main__`.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def arm(expected_parent: int | None = None) -> None:
    """Ask for SIGKILL at the parent's death; exit at once when it died before we could ask."""
    parent = os.getppid() if expected_parent is None else expected_parent
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

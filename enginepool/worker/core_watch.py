"""Watches engine cores that run in processes of their own: vLLM 0.32's `step()` waits for ever for one that was killed.

(`SyncMPClient.get_output` blocks on a queue that nothing fills once its reader thread has been shut down.)
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


def watch_cores(pids: list[int], on_death: Callable[[str], None]) -> None:
    """Call `on_death` with what happened, on a thread of its own, as soon as one of these processes ends."""
    if pids:
        fds = {os.pidfd_open(pid): pid for pid in pids}
        threading.Thread(target=_watch, args=(fds, on_death), name="enginepool-cores", daemon=True).start()


def _watch(fds: dict[int, int], on_death: Callable[[str], None]) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    ended = [fds[fd] for fd, _ in poll.poll()]
    on_death(f"the engine core (pid {ended[0]}) died")

"""What an item of the echo engine can do to its worker, for tests of what the pool makes of it.

- `raise`, `exit` (with `code`, 9 by default), `segfault`, `kill` (SIGKILL), `oom` (takes memory until the kernel
  kills it), `stop` (SIGSTOP): end or stop the process.
- `hang`: the engine's thread waits for ever. `sleep`: for `for_s` seconds. `freeze`: it computes for about as long with the
  interpreter's lock held, so that no other thread runs. `deadlock`: it holds the lock and waits for ever.
- `mute`: the thread of the heartbeats ends, the engine goes on.
- In the engine itself: `miscount` (it forgets its items), `spin` (its steps return nothing any more), `starve` (this item
  gets no token any more, its neighbours do), `block` (the same, and the engine says that it waits for something of its own).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

EATEN_BYTES = 16 << 20
SOME = 2_000_000


def misbehave(fault: dict[str, Any]) -> None:
    """Do what `fault["fault"]` says; an unknown word is an error of the script, and ends the engine."""
    match fault["fault"]:
        case "raise":
            raise RuntimeError("the script raises here")
        case "exit":
            os._exit(fault.get("code", 9))
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "oom":
            _eat_memory()
        case "hang":
            while True:
                time.sleep(3600)
        case "sleep":
            time.sleep(fault["for_s"])
        case "freeze":
            _compute(fault["for_s"])
        case "deadlock":
            _lock_twice()
        case "mute":
            _end_the_beat()
        case word:
            raise ValueError(f"the script knows no fault {word!r}")


def _eat_memory() -> None:
    """Fill memory until the kernel kills for lack of it; this process offers itself as the first to go."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    while True:
        held.append(b"\1" * EATEN_BYTES)


def _lock_twice() -> None:
    """A deadlock that keeps the interpreter's lock too; no signal ends it."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _compute(seconds: float) -> None:
    """One call into native code that keeps the interpreter's lock, as long as a first one makes it expect."""
    started = time.monotonic()
    sum(range(SOME))
    sum(range(int(SOME * seconds / (time.monotonic() - started))))


def _end_the_beat() -> None:
    """Raise in the thread of the heartbeats; it ends at its next instruction."""
    for thread in threading.enumerate():
        if thread.name == "enginepool-beat" and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

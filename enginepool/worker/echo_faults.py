"""What an item of the echo engine can do to its worker, for tests of what the pool makes of it.

- `raise`, `exit` (with `code`, 9 by default), `segfault`, `kill` (SIGKILL), `stop` (SIGSTOP): end or stop the process.
- `hang`: the engine's thread waits for ever. `sleep`: for `for_s` seconds. `freeze`: the same with the interpreter's lock held, so
  that no thread of the process runs.
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
from typing import Any


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
        case "hang":
            while True:
                time.sleep(3600)
        case "sleep":
            time.sleep(fault["for_s"])
        case "freeze":
            ctypes.PyDLL(None).usleep(int(fault["for_s"] * 1e6))
        case "mute":
            _end_the_beat()
        case word:
            raise ValueError(f"the script knows no fault {word!r}")


def _end_the_beat() -> None:
    """Raise in the thread of the heartbeats; it ends at its next instruction."""
    for thread in threading.enumerate():
        if thread.name == "enginepool-beat" and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

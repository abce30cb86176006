"""What tests put around a pool: code that runs at the start of its interpreters, and masks."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def customized(folder: Path, worker: str = "", everywhere: str = "") -> dict[str, str]:
    """The environment of a pool whose interpreters run this code first, by a `sitecustomize` on PYTHONPATH."""
    own = folder / "customized"
    own.mkdir()
    inner = textwrap.indent(worker or "pass", "    ")
    (own / "sitecustomize.py").write_text(f"import sys\n{everywhere}\nif 'enginepool.worker.main' in sys.orig_argv:\n{inner}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(own), os.environ.get("PYTHONPATH")]))}


def gated(folder: Path, gate: Path) -> dict[str, str]:
    """The environment of a pool whose workers don't start while a file of this name is there."""
    return customized(folder, worker=f"import os, time\nwhile os.path.exists({str(gate)!r}): time.sleep(0.01)")


def deaf_to_its_host(folder: Path) -> dict[str, str]:
    """The environment of a pool whose dispatcher, once stopped, stays so: as one that hangs for good."""
    return customized(folder, everywhere="from enginepool import lifeline; lifeline.signal_at_end = lambda *_: None")


def on_one_core() -> Callable[[], None]:
    """Something to run before exec: the process, and what it starts, may use the first allowed core only."""
    core = min(os.sched_getaffinity(0))
    return lambda: os.sched_setaffinity(0, {core})


def without_network(*, loopback: bool) -> Callable[[], None]:
    """Something to run before exec: the process, and what it starts, have no network but loopback, or not even that."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace")
        if loopback:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))

    return enter


def config(folder: Path, **engine_args: object) -> str:
    """A settings file with these engine arguments."""
    path = folder / "pool.toml"
    path.write_text("[engine_args]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in engine_args.items()))
    return str(path)

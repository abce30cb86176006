"""Where bfloat16 is slow: told from the CPU's flags, and only where nobody has chosen a dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginepool.config import PoolSettings
from enginepool.dispatcher.machine import read_machine
from enginepool.dispatcher.plan import Plan
from enginepool.preflight import dtype
from enginepool.preflight.packages import Packages
from enginepool.preflight.plan import make_plan


def _plan(settings: PoolSettings) -> Plan:
    return make_plan(settings, Packages(has_vllm=True), read_machine(), {})


@pytest.mark.parametrize(
    ("flags", "machine", "is_slow"),
    [
        ("fpu avx avx2 fma", "x86_64", True),
        ("fpu avx2 avx512f avx512_bf16", "x86_64", False),
        ("fpu avx2", "aarch64", False),
    ],
)
def test_bfloat16_is_slow_on_x86_without_avx512(tmp_path: Path, flags: str, machine: str, is_slow: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert dtype.is_bfloat16_slow(cpuinfo, machine) is is_slow


def test_cpu_that_does_not_tell_is_taken_for_fast(tmp_path: Path) -> None:
    assert not dtype.is_bfloat16_slow(tmp_path / "none", "x86_64")


def test_named_model_is_warned_of_and_a_chosen_dtype_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "is_bfloat16_slow", lambda: True)
    named, embedded = PoolSettings(model="m"), PoolSettings()
    chosen = PoolSettings(model="m", vllm_flags=["--dtype", "bfloat16"])
    assert "--dtype float32" in (dtype.dtype_warning(named, _plan(named)) or "")
    assert dtype.is_dtype_open(embedded, _plan(embedded))
    assert dtype.dtype_warning(embedded, _plan(embedded)) is None
    assert dtype.dtype_warning(chosen, _plan(chosen)) is None
    assert not dtype.is_dtype_open(PoolSettings(engine="echo"), _plan(PoolSettings(engine="echo")))

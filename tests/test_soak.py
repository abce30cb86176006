"""A short seeded soak: kills, crashes, stops, pauses, interrupts and rubbish at once, and books that balance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "bench" / "soak.py"


@pytest.mark.timeout(180)
def test_soak_of_all_faults_balances() -> None:
    command = [sys.executable, str(SOAK), "--brief", "--minutes", "0.25", "--every-s", "0.5", "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0: missed" not in done.stdout
    assert done.stdout.count("0: met") == 6

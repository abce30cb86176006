"""Judges the installed packages: whether vLLM can be imported with what stands beside it; pure."""

from __future__ import annotations

from collections.abc import Iterator

from enginepool.doctor.facts import Facts
from enginepool.doctor.verdict import Finding, error, ok, warning
from enginepool.errors import ExitCode
from enginepool.preflight.packages import COMPANIONS, Package, Packages

REMOVE = "pip uninstall -y torchvision torchaudio torchcodec (text models don't need them)"


def judge_installed(facts: Facts) -> Iterator[Finding]:
    """vLLM, what it can't be imported without, and the companions of torch that were built for another one."""
    packages = facts.packages
    if facts.engine == "echo" or any(refusal.topic == "vllm" for refusal in facts.refusals) or not packages.has_vllm:
        return
    findings = [*_needed(packages), *_companions(packages), *_platform(facts)]
    if facts.newer_vllm:
        findings.append(warning("vllm", facts.newer_vllm, "run the tests, or install vLLM 0.32"))
    yield from findings or [ok("vllm", f"vLLM {_version(packages, packages.vllm_name)} with torch {_version(packages, 'torch')}")]


def _needed(packages: Packages) -> Iterator[Finding]:
    """A requirement that isn't there fails the import; one of another version only may."""
    if packages.vllm_name is None:
        return
    reinstall = f"pip install --force-reinstall '{packages.vllm_name}=={packages.found[packages.vllm_name].version.partition('+')[0]}'"
    for name in ("torch", "transformers", "tokenizers", "huggingface_hub"):
        wanted = _wanted(packages.found[packages.vllm_name], name)
        have = packages.found.get(name)
        if have is None:
            yield error("vllm", f"vLLM can't be imported: {name} is not installed", reinstall, ExitCode.ENGINE_MISSING)
        elif wanted and not _fits(have.version, wanted):
            yield warning("vllm", f"{name} {have.version} is installed, but this vLLM asks for {wanted}", reinstall)


def _companions(packages: Packages) -> Iterator[Finding]:
    torch = packages.found.get("torch")
    for name in COMPANIONS if torch else ():
        companion = packages.found.get(name)
        if companion is not None and torch is not None and (finding := _compare(name, companion, torch)):
            yield finding


def _compare(name: str, companion: Package, torch: Package) -> Finding | None:
    """Seen with torch 2.13.0+cpu and PyPI's wheels: vLLM imports all three, and each fails to load its CUDA half."""
    what = f"{name} {companion.version}"
    if (torch.build or "").startswith("cpu") and (companion.build or "").startswith("cu"):
        text = f"{what} is built for CUDA ({companion.build}), but torch is {torch.version}, without it: importing vLLM fails"
        return error("vllm", text, REMOVE, ExitCode.START_FAILED)
    if name == "torchvision" and _is_other_cuda(companion.build, torch.build):
        text = f"{what} is built for CUDA {companion.build}, torch {torch.version} for {torch.build}: importing vLLM fails"
        return error("vllm", text, REMOVE, ExitCode.START_FAILED)
    if (wanted := _wanted(companion, "torch")) and not _fits(torch.version, wanted):
        text = f"{what} asks for torch {wanted}, but {torch.version} is installed: importing vLLM may fail on it"
        return warning("vllm", text, f"install the one made for this torch, or {REMOVE}")
    if companion.build is None and (torch.build or "").startswith("cpu"):
        return warning("vllm", f"{what} doesn't say whether it was built for torch {torch.version}", f"if importing vLLM fails: {REMOVE}")
    return None


def _is_other_cuda(one: str | None, other: str | None) -> bool:
    """torchvision compares the major numbers when it is imported, and raises."""
    return bool(one and other and one.startswith("cu") and other.startswith("cu") and one[:4] != other[:4])


def _platform(facts: Facts) -> Iterator[Finding]:
    package = facts.packages.found.get("vllm")
    if package is None or "cpu" in package.version or facts.machine.gpus:
        return
    text = f"vLLM {package.version} is not a CPU build, and no NVIDIA GPU was found: workers start only if another accelerator is there"
    yield warning("vllm", text, "check the driver and the container's devices, or install 'enginepool[cpu]' in an environment of its own")


def _wanted(package: Package, name: str) -> str | None:
    """What a package asks of another, such as `==2.13.0`; None when it asks nothing here or that can't be told."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return None
    for line in package.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        is_here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_here and requirement.name.replace("-", "_").lower() == name:
            return str(requirement.specifier) or None
    return None


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted, prereleases=True).contains(version)


def _version(packages: Packages, name: str | None) -> str:
    package = packages.found.get(name or "")
    return package.version if package else "(unknown version)"

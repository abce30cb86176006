"""The folders that a pool and its engines write to: where each is, who said so, whether it can be written, how much is free."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from enginepool.demo.model import cache_folder
from enginepool.errors import SettingsError
from enginepool.preflight.model import hub_cache


class Folder(msgspec.Struct, frozen=True):
    """One folder. `origin` is the variable that named it or `default`; `fault` is why nothing can be written there."""

    name: str
    path: str
    origin: str
    exists: bool
    fault: str | None
    free_bytes: int | None


def read_folders(environ: Mapping[str, str] = os.environ) -> tuple[Folder, ...]:
    """Look at the folder of each cache, and at the temp folder that workers get a private one in."""
    shared = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    vllm = Path(environ.get("VLLM_CACHE_ROOT") or shared / "vllm").expanduser()
    temp, temp_fault = _temp_folder(environ)
    inductor = Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or temp / f"torchinductor_{_user()}")
    hub_names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    return (
        _look("embedded model", cache_folder(), environ, ("ENGINEPOOL_CACHE", "XDG_CACHE_HOME")),
        _look("hub cache", hub_cache(environ), environ, hub_names),
        _look("vLLM cache", vllm, environ, ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME")),
        _look("torch compiler", inductor, environ, ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")),
        msgspec.structs.replace(_look("temporary files", temp, environ, ("TMPDIR", "TEMP", "TMP")), fault=temp_fault),
    )


def engine_socket_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """How long the path of an engine core's socket gets: vLLM names it by a UUID, in the folder that the supervisor makes for a worker."""
    own = f"{_temp_folder(environ)[0]}/enginepool-{os.getpid()}-w12345678"
    return len(os.fsencode(environ.get("VLLM_RPC_BASE_PATH", own))) + 1 + 36


def check_trace(trace: str | None) -> None:
    """Raise SettingsError for a trace file that the dispatcher could not open; it is not made here."""
    if trace is None:
        return
    path = Path(trace).expanduser()
    why = "it is a folder" if os.path.isdir(path) else None
    if os.path.exists(path):
        why = why or (None if os.access(path, os.W_OK) else "it can't be written")
    else:
        why = why_not_writable(path.parent) if os.path.isdir(path.parent) else f"there is no folder {path.parent}"
    if why:
        raise SettingsError(f"trace {trace}: {why}; choose another file")


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in `folder` (made itself when it isn't there), or None; nothing is written."""
    nearest = _nearest(folder)
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder"
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    return f"{nearest} can't be written" if nearest != folder else "it can't be written"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _temp_folder(environ: Mapping[str, str]) -> tuple[Path, str | None]:
    """Where temporary files go; Python itself tries out which folder takes them."""
    try:
        return Path(tempfile.gettempdir()), None
    except FileNotFoundError as error:
        return Path(environ.get("TMPDIR") or "/tmp"), str(error.strerror)


def _look(name: str, path: Path, environ: Mapping[str, str], variables: tuple[str, ...]) -> Folder:
    origin = next((variable for variable in variables if environ.get(variable)), "default")
    return Folder(name, str(path), origin, os.path.isdir(path), why_not_writable(path), _free_bytes(path))


def _nearest(path: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    return next((step for step in (path, *path.parents) if os.path.lexists(step)), Path("/"))


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(_nearest(path)).free
    except OSError:
        return None

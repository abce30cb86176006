"""Where a named model lies: a folder, the hub's cache, or still to be fetched. Follows huggingface_hub's rules without importing it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from enginepool.config import PoolSettings
from enginepool.errors import StartError
from enginepool.preflight.folder import find_faults
from enginepool.preflight.plan import engine_option

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_TRUE = ("1", "ON", "YES", "TRUE")


class ModelPlace(msgspec.Struct, frozen=True):
    """What `model` means here. `folder` is what would be read; None: it has to be fetched from the hub first."""

    model: str
    is_path: bool
    folder: Path | None
    is_offline: bool = False


def find_model(settings: PoolSettings, environ: Mapping[str, str] = os.environ) -> ModelPlace | None:
    """Look for the model that the settings name; None for the embedded one and for echo engines."""
    model = settings.model
    if model is None or settings.engine == "echo":
        return None
    path = Path(model).expanduser()
    exists = os.path.exists(path)  # the method of Path raises where a folder above may not be entered
    if is_path(model) or exists:
        return ModelPlace(model, True, path if exists else None)
    revision = engine_option(settings, "revision")
    snapshot = find_snapshot(model, str(revision or "main"), environ)
    return ModelPlace(model, False, snapshot, is_offline(environ) and not environ.get("VLLM_USE_MODELSCOPE"))


def check_model(settings: PoolSettings, environ: Mapping[str, str] = os.environ) -> None:
    """Raise StartError at once for a model that can't be loaded, before any worker spends seconds on imports."""
    place = find_model(settings, environ)
    if place is None:
        return
    if place.is_path and place.folder is None:
        raise StartError(f"model {place.model}: there is no such file or folder; give a model folder or a hub id")
    if place.folder is None and place.is_offline and _HUB_ID.match(place.model):
        cache = hub_cache(environ)
        raise StartError(
            f"model {place.model}: HF_HUB_OFFLINE is set and the model is not in the hub's cache {cache}; "
            "unset it, fetch the model first, or give the model's folder"
        )
    # What a cached snapshot lacks is fetched, unless the hub must not be asked.
    if place.folder is not None and place.folder.is_dir() and (place.is_path or place.is_offline):
        shadow = (
            "" if is_path(place.model) or not place.is_path else f"{place.folder.absolute()} goes before a hub model of that name, but "
        )
        for fault in find_faults(place.folder, settings):
            raise StartError(f"model {place.model}: {shadow}{fault}")


def is_path(model: str) -> bool:
    """Whether `model` is written as a path, so that it can't be a hub id."""
    return model.startswith(("/", "./", "../", "~"))


def is_on_disk(model: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the model needs no download; otherwise one worker fetches it first."""
    return os.path.exists(model) or os.path.isdir(_repository(model, environ) / "snapshots")


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether the hub must not be asked."""
    return (environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder that holds models fetched from the hub."""
    if chosen := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(chosen)).expanduser()
    shared = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    return Path(os.path.expandvars(environ.get("HF_HOME") or str(shared / "huggingface"))).expanduser() / "hub"


def find_snapshot(model: str, revision: str, environ: Mapping[str, str]) -> Path | None:
    """The cached snapshot of a branch, tag or commit; None when it was never fetched."""
    repository = _repository(model, environ)
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if os.path.isdir(folder) else None


def _repository(model: str, environ: Mapping[str, str]) -> Path:
    return hub_cache(environ) / f"models--{model.replace('/', '--')}"

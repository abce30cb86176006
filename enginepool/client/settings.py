"""Settings of a pool that Python starts: keywords become PoolSettings, all other names are engine arguments."""

from __future__ import annotations

import os
from typing import Any

from enginepool.client.engine_args import check_engine_args
from enginepool.config import PoolSettings, build_settings, nearest_setting
from enginepool.errors import SettingsError

_KEYWORDS = set(PoolSettings.__struct_fields__) - {"engine_args", "model"}


def make_settings(model: str | os.PathLike[str] | None, **values: Any) -> PoolSettings:
    """Build the settings from what `Pool` and `Sidecar` take. Raises SettingsError naming what is wrong."""
    own = {name: value for name, value in values.items() if name in _KEYWORDS}
    engine_args = {name: value for name, value in values.items() if name not in _KEYWORDS}
    for name in engine_args:
        if name == "engine_args":
            raise SettingsError("engine arguments are given by their own names, not as engine_args")
        if near := nearest_setting(name):
            raise SettingsError(f"there is no setting {name!r}; did you mean {near!r}?")
    path = None if model is None else os.fspath(model)
    for name in ("request_format", "keys"):
        if isinstance(given := own.get(name), os.PathLike):
            own[name] = os.fspath(given)
    return build_settings({"model": path, "log_level": "warning", "engine_args": check_engine_args(engine_args), **own})

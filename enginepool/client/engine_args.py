"""Checks that engine arguments can travel to the workers; what can't is refused by its name."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from enginepool.errors import SettingsError


def check_engine_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as plain values. Raises SettingsError naming one that has no plain form."""
    return {name: _plain(name, value) for name, value in args.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        hint = "give its name as text" if type(value).__module__.startswith("torch") or isinstance(value, type) else "give plain values"
        raise SettingsError(f"engine argument {name!r} ({type(value).__name__}) can not be sent to a worker: {error}; {hint}") from None

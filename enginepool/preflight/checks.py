"""The checks that come first, in the order in which `serve` makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from enginepool.config import PoolSettings
from enginepool.preflight.model import check_model
from enginepool.preflight.packages import Packages, check_vllm
from enginepool.preflight.plan import check_flags, choose_format

Check = Callable[[], object]


def early_checks(settings: PoolSettings, packages: Packages) -> list[tuple[str, Check]]:
    """What has to hold before anything is planned, each with its topic; each raises an EnginePoolError."""
    if settings.engine == "echo":
        first: list[tuple[str, Check]] = [("settings", partial(check_flags, settings))]
    else:
        first = [("vllm", partial(check_vllm, packages)), ("model", partial(check_model, settings))]
    return [*first, ("settings", partial(choose_format, settings))]

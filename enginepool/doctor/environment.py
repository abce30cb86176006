"""The environment variables that change a pool, what becomes of each, and what must never be shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from enginepool.config import PoolSettings, is_service_link, iter_settings
from enginepool.dispatcher.plan import Plan

_SHOWN = re.compile(
    r"^(ENGINEPOOL_|VLLM_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|HF_|HUGGINGFACE_|TRANSFORMERS_|TORCH|CUDA_|NVIDIA_VISIBLE|XDG_(CACHE|RUNTIME)"
    r"|PYTORCH_|TOKENIZERS_|(LOCAL_|NODE_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|LD_(PRELOAD|LIBRARY_PATH)$|TMPDIR$"
    r"|PYTHONPATH$|HTTPS?_PROXY$|ALL_PROXY$)",
    re.IGNORECASE,
)
_SECRET = re.compile(r"(^|[_-])token$|api.?key|secret|passw|passphrase|credential|[_-](key|pass)$", re.IGNORECASE)
_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")
HIDDEN = "(set, not shown)"


class Variable(msgspec.Struct, frozen=True):
    """One variable of the environment and what the workers get of it: `kept`, `removed`, or the value that replaces it."""

    name: str
    value: str
    worker: str


def read_variables(environ: Mapping[str, str], plan: Plan | None) -> tuple[Variable, ...]:
    """The variables that matter, sorted, without secrets."""
    names = sorted(name for name in environ if _SHOWN.match(name) and not is_service_link(name))
    return tuple(Variable(name, shown_value(name, environ[name]), _fate(name, plan)) for name in names)


def shown_value(name: str, value: Any) -> str:
    """A value as it may be printed."""
    return HIDDEN if _SECRET.search(name) else _LOGIN.sub(r"\1…@", str(value))


def shown_settings(settings: PoolSettings, origins: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The settings that differ from their default, each as (value, origin), without secrets."""
    shown: dict[str, tuple[str, str]] = {}
    for item in iter_settings():
        value, origin = getattr(settings, item.name), origins.get(item.name, "default")
        if item.name == "engine_args":
            shown |= {f"engine_args.{name}": (shown_value(name, one), origin) for name, one in value.items()}
        elif item.name == "vllm_flags" and value:
            shown[item.name] = (" ".join(_shown_flags(value)), "after `--`" if origin == "flag" else origin)
        elif value != item.default:
            shown[item.name] = (shown_value(item.name, value), origin)
    return shown


def find_secrets(environ: Mapping[str, str], settings: PoolSettings | None) -> set[str]:
    """Values that must not appear in anything that is printed, wherever they came from."""
    pairs: list[tuple[str, Any]] = list(environ.items())
    if settings:
        pairs += list(settings.engine_args.items())
        pairs += _flag_pairs(settings.vllm_flags)
    return {str(value) for name, value in pairs if _SECRET.search(name) and len(str(value)) >= 6}


def _flag_pairs(flags: list[str]) -> Iterator[tuple[str, str]]:
    for flag, following in zip(flags, [*flags, ""][1:], strict=True):
        name, equals, value = flag.partition("=")
        if flag.startswith("-"):
            yield name, value if equals else following


def _shown_flags(flags: list[str]) -> Iterator[str]:
    for before, flag in zip(["", *flags][: len(flags)], flags, strict=True):
        name, equals, value = flag.partition("=")
        if before.startswith("-") and "=" not in before and not flag.startswith("-"):
            yield shown_value(before, flag)
        else:
            yield f"{name}={shown_value(name, value)}" if equals else flag


def _fate(name: str, plan: Plan | None) -> str:
    if plan is None or not plan.workers:
        return "kept"
    values = [worker.env_set.get(name) for worker in plan.workers]
    if values[0] is not None:
        return values[0] if len(set(values)) == 1 else f"{values[0]} … {values[-1]}"
    return "removed" if name in plan.workers[0].env_unset else "kept"

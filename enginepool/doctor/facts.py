"""Gathers what `serve` would meet with the same settings: thin, reads small files, changes nothing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from enginepool.config import PoolSettings, resolve_settings, unknown_variables
from enginepool.demo.model import cache_folder, model_path, require_packages
from enginepool.dispatcher.machine import Machine, read_machine
from enginepool.dispatcher.plan import Plan
from enginepool.doctor.endpoint import EndpointFacts, examine_endpoint
from enginepool.doctor.environment import Variable, read_variables, shown_settings
from enginepool.doctor.folders import Folder, check_trace, engine_socket_bytes, read_folders
from enginepool.doctor.limits import Limits, read_limits
from enginepool.errors import EnginePoolError
from enginepool.preflight.checks import early_checks
from enginepool.preflight.dtype import dtype_warning
from enginepool.preflight.model import find_model
from enginepool.preflight.packages import Packages, newer_than_tested, read_packages
from enginepool.preflight.plan import count_ranks, make_plan

T = TypeVar("T")


class Refusal(msgspec.Struct, frozen=True):
    """What one of `serve`'s own checks said, and the code `serve` exits with then."""

    topic: str
    text: str
    exit_code: int


class ModelFacts(msgspec.Struct, frozen=True):
    """The model in question. `folder` is where it lies, or for the embedded one would be prepared; `is_there` whether it is."""

    kind: Literal["echo", "embedded", "path", "hub"]
    name: str
    folder: str | None = None
    is_there: bool = False
    has_pip: bool = True


class Facts(msgspec.Struct, frozen=True):
    """All that was found; `refusals` stand in the order in which `serve` makes its checks."""

    machine: Machine
    packages: Packages
    engine: Literal["vllm", "echo"] = "vllm"
    refusals: tuple[Refusal, ...] = ()
    newer_vllm: str | None = None
    plan: Plan | None = None
    num_ranks: int = 1
    visible_devices: str | None = None
    model: ModelFacts | None = None
    endpoint: EndpointFacts | None = None
    limits: Limits = Limits()
    folders: tuple[Folder, ...] = ()
    engine_socket_bytes: int = 0
    variables: tuple[Variable, ...] = ()
    unknown: tuple[str, ...] = ()
    settings: dict[str, tuple[str, str]] = {}
    dtype_warning: str | None = None


class _Refusals(list[Refusal]):
    def during(self, topic: str, act: Callable[[], T]) -> T | None:
        """What `act` returns; its refusal is kept instead of raised."""
        try:
            return act()
        except EnginePoolError as error:
            self.append(Refusal(topic, str(error), int(error.exit_code)))
            return None


def gather(
    given: Mapping[str, Any], config: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[Facts, PoolSettings | None]:
    """Look at everything; `given` and `config` are what `serve` would be given. The settings are None when they are refused."""
    refusals = _Refusals()
    machine, packages = read_machine(), read_packages()
    resolved = refusals.during("settings", lambda: resolve_settings(given, environ, config))
    facts = Facts(
        machine=machine,
        packages=packages,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        limits=read_limits(),
        folders=read_folders(environ),
        engine_socket_bytes=engine_socket_bytes(environ),
        unknown=tuple(unknown_variables(environ)),
        variables=read_variables(environ, None),
        refusals=tuple(refusals),
    )
    return (_with_settings(facts, *resolved, refusals, environ), resolved[0]) if resolved else (facts, None)


def _with_settings(facts: Facts, settings: PoolSettings, origins: dict[str, str], refusals: _Refusals, environ: Mapping[str, str]) -> Facts:
    for topic, check in early_checks(settings, facts.packages):
        refusals.during(topic, check)
    plan = refusals.during("placement", lambda: make_plan(settings, facts.packages, facts.machine, environ))
    refusals.during("settings", lambda: check_trace(settings.trace))
    endpoint = refusals.during("endpoint", lambda: examine_endpoint(settings.endpoint, environ, keys=settings.keys))
    model = _find_model(settings, environ, refusals)
    return msgspec.structs.replace(
        facts,
        engine=settings.engine,
        newer_vllm=newer_than_tested(facts.packages) if settings.engine == "vllm" else None,
        plan=plan,
        num_ranks=count_ranks(settings),
        endpoint=endpoint,
        model=model,
        settings=shown_settings(settings, origins),
        variables=read_variables(environ, plan),
        refusals=tuple(refusals),
        dtype_warning=None if plan is None else dtype_warning(settings, plan),
    )


def _find_model(settings: PoolSettings, environ: Mapping[str, str], refusals: _Refusals) -> ModelFacts:
    if settings.engine == "echo":
        return ModelFacts("echo", "echo", is_there=True)
    place = find_model(settings, environ)
    if place is not None:
        folder = None if place.folder is None else str(place.folder)
        return ModelFacts("path" if place.is_path else "hub", place.model, folder, place.folder is not None)
    if ready := model_path():
        return ModelFacts("embedded", "the embedded model", str(ready), True)
    # Without vLLM its packages would only be named twice.
    if not any(refusal.topic == "vllm" for refusal in refusals):
        refusals.during("model", require_packages)
    return ModelFacts("embedded", "the embedded model", str(cache_folder()), has_pip=importlib.util.find_spec("pip") is not None)

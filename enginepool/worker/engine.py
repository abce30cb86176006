"""What a worker needs of an engine: admit, step, abort. Both engines and the feeder speak in lease numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from enginepool.errors import Code, EnginePoolError, ItemError
from enginepool.payload import GenerateRequest, GenerateResult
from enginepool.status import Load

Report = Callable[[str], None]
Finished = tuple[int, "GenerateResult | ItemError"]


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself once it is up."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    tasks: list[str] = []
    config: dict[str, Any] = {}


class RefusedItem(EnginePoolError):
    """The engine will not run this item; its neighbours are fine."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.error = ItemError(code, message)


class StartRefused(EnginePoolError):
    """The engine can not be built from what it was given; trying again would not help."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EngineBroken(EnginePoolError):
    """The engine answered in a way that leaves its state unknown; the worker has to be replaced."""


class Engine(Protocol):
    """One engine, used by one thread."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""

    def admit(self, lease: int, request: GenerateRequest, arrived: float) -> None:
        """Add an item; it runs from the next step on. Raises RefusedItem when this item is at fault."""

    def step(self) -> list[Finished]:
        """Run one iteration; returns what has finished. Any exception means that the engine is lost."""

    def abort(self, leases: list[int]) -> None:
        """Stop these items; no result comes for them."""

    @property
    def has_unfinished(self) -> bool:
        """Whether the engine holds items."""

    @property
    def core_pids(self) -> list[int]:
        """Processes without which the engine can not go on (none when it runs in this one)."""

    def load(self) -> Load:
        """What the engine is doing; cheap enough for once a second."""

    def close(self) -> None:
        """Release everything."""


def hint_for(error: BaseException) -> str:
    """What to do about a failure whose message does not say it."""
    text = str(error)
    if "KV cache" in text or "kv cache" in text:
        return "; give all CPU workers together more with kv_cache_budget_bytes, or set a smaller max_model_len"
    if "torchvision" in text or "Could not import module" in text:
        return "; torchvision is built for another torch, remove it: pip uninstall torchvision torchaudio torchcodec"
    return ""

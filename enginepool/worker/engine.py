"""What a worker needs of an engine: admit, step, abort. Both engines and the feeder speak in lease numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from enginepool.chat_format import PLAIN, RequestFormat, why_not_text
from enginepool.clock import EngineStamps
from enginepool.errors import Code, EnginePoolError, ItemError, sayable
from enginepool.payload import ChatOptions, CompletionOutput, GenerateResult, Request
from enginepool.status import Load

Report = Callable[[str], None]
Scope = Callable[[str], AbstractContextManager[Any]]


class Finished(msgspec.Struct, frozen=True):
    """The end of one item; of a stream the result holds what its deltas have not."""

    lease: int
    result: GenerateResult | ItemError
    stamps: EngineStamps


class Streamed(msgspec.Struct, frozen=True):
    """What is new in one stream."""

    lease: int
    parts: list[CompletionOutput]


Event = Finished | Streamed


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

    def __init__(self, code: Code, message: str, *, status: int | None = None, kind: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.error = ItemError(code, sayable(message), status, kind, param)


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

    def admit(self, lease: int, request: Request, arrived: float) -> None:
        """Add an item; it runs from the next step on. Raises RefusedItem when this item is at fault."""

    def step(self) -> list[Event]:
        """Run one iteration; returns what has come of it. Any exception means that the engine is lost."""

    def abort(self, leases: list[int]) -> None:
        """Stop these items; no result comes for them."""

    @property
    def scope(self) -> Scope:
        """Makes a profiler's scope of a name; a null context unless profiling was asked for."""

    @property
    def has_unfinished(self) -> bool:
        """Whether the engine holds items."""

    @property
    def step_lag(self) -> int:
        """How many steps return after an item's admission until its first one has been run through."""

    @property
    def progress(self) -> int:
        """Changes whenever tokens were computed, those of a long prompt included; never because a step returned."""

    def token_counts(self) -> dict[int, int]:
        """The tokens generated so far for each item in hand."""

    def blocked(self) -> list[int]:
        """Items that wait for something of their own (the compilation of a schema), not for their turn."""

    @property
    def core_pids(self) -> list[int]:
        """Processes without which the engine can not go on (none when it runs in this one)."""

    def load(self) -> Load:
        """What the engine is doing; cheap enough for once a second."""

    def close(self) -> None:
        """Release everything."""


NO_TEMPLATE = "the model has no chat template; give a chat_template, or request_format plain or default-template"


def choose_format(options: ChatOptions, pool_format: RequestFormat) -> RequestFormat:
    """A call's own format, else the pool's. Raises RefusedItem for tools that the format has no place for."""
    chosen = pool_format if options.request_format is None else RequestFormat(options.request_format, options.chat_template)
    if chosen.kind == PLAIN and options.tools:
        raise RefusedItem(Code.INVALID_REQUEST, "plain format has no place for tools; give a chat_template or another request_format")
    return chosen


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse media here too: a client of somebody else's making may send anything. Raises RefusedItem."""
    for number, message in enumerate(messages):
        content = message.get("content")
        fault = "content must be text or a list of parts" if isinstance(content, Mapping) else None
        for part in content if isinstance(content, list) else ():
            fault = fault or why_not_text(part)
        if fault:
            raise RefusedItem(Code.INVALID_REQUEST, f"message {number}: {fault}")


def check_template_name(template: str | None, names: Sequence[str]) -> None:
    """A word names one of the tokenizer's templates; an unknown one would be taken for the prompt itself. Raises RefusedItem."""
    if template is not None and "{" not in template and template not in names:
        known = f"its tokenizer has {', '.join(names)}" if names else "its tokenizer names none"
        raise RefusedItem(Code.INVALID_REQUEST, f"the model has no chat template named {template!r}: {known}; give a template's text")


_NO_NETWORK = ("ConnectError", "ConnectTimeout", "name resolution", "Network is unreachable", "Max retries exceeded", "couldn't connect to")


def hint_for(error: BaseException) -> str:
    """What to do about a failure whose message does not say it."""
    text = str(error)
    if "KV cache" in text or "kv cache" in text:
        return "; give all CPU workers together more with kv_cache_budget_bytes, or set a smaller max_model_len"
    if any(name in text for name in ("torchvision", "torchaudio", "torchcodec", "Could not import module")):
        return "; a companion of torch is built for another one, remove it: pip uninstall torchvision torchaudio torchcodec"
    if any(words in text + type(error).__name__ for words in _NO_NETWORK):
        return "; the hub can't be reached: HF_HUB_OFFLINE=1 lets a model in its cache load without, others have to be given as folders"
    if "Unable to find interface for" in text:
        return "; vLLM needs the loopback interface even in one process: ip link set lo up"
    return ""

"""vLLM's own serving objects, as `vllm run-batch` builds them, on an engine client that hands every request on to ours."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import State
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_REASONING = ("reasoning_ended", "reasoning_parser_kwargs")


class Asker(Protocol):
    """Whoever a serving object works for right now."""

    def ask(self, prompt: Any, params: Any, options: dict[str, Any]) -> asyncio.Future[Any]:
        """Add one engine request; the future gets its final output."""


ASKER: ContextVar[Asker] = ContextVar("ASKER")


class EngineClient:
    """What vLLM's serving objects read of an engine client; it never waits for the engine."""

    errored = False

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.vllm_config = engine.vllm_config
        self.model_config = engine.model_config
        self.renderer = engine.renderer
        self.input_processor = engine.input_processor

    @property
    def dead_error(self) -> BaseException:
        """What a dead engine is told by; ours is replaced instead."""
        error: BaseException = EngineDeadError()
        return error

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """The dispatcher has let it in."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Add a request under an id of our own; `request_id` stays the response's."""
        return _answer(ASKER.get().ask(prompt, sampling_params, options))

    def encode(self, prompt: Any, pooling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """The same for pooling models."""
        return _answer(ASKER.get().ask(prompt, pooling_params, options))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter that was named at start."""
        return bool(self._engine.add_lora(lora_request))

    async def is_tracing_enabled(self) -> bool:
        """Tracing goes by HTTP headers, and there are none."""
        return False

    async def get_supported_tasks(self) -> Any:
        """As the engine tells."""
        return self._engine.get_supported_tasks()

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """There is no remote prefill to free."""


async def _answer(future: asyncio.Future[Any]) -> AsyncGenerator[Any, None]:
    yield await future


async def build_serving(engine: LLMEngine, arguments: Namespace) -> State:
    """Everything that a server would have. Raises whatever vLLM raises for arguments that do not fit the model."""
    state = State()
    client: Any = EngineClient(engine)
    await init_app_state(client, state, arguments, engine.get_supported_tasks())
    return state


def add_request(engine: LLMEngine, request_id: str, prompt: Any, params: Any, options: dict[str, Any]) -> None:
    """Add what a serving object has asked for, as vLLM's `AsyncLLM.add_request` does."""
    has_priorities = engine.vllm_config.scheduler_config.policy == "priority"
    wanted = {
        "lora_request": options.get("lora_request"),
        "priority": options.get("priority", 0) if has_priorities else 0,
        "session_id": options.get("session_id"),
    }
    reasoning = {name: options[name] for name in _REASONING if options.get(name) is not None}
    if not reasoning:
        engine.add_request(request_id, prompt, params, **wanted)
        return
    tasks = engine.get_supported_tasks()
    request = engine.input_processor.process_inputs(request_id, prompt, params, supported_tasks=tasks, **wanted)
    for name, value in reasoning.items():
        setattr(request, name, value)
    engine.add_request(request_id, request, params, prompt_text=prompt.get("prompt"))

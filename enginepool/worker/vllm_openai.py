"""Answers requests of OpenAI's API with vLLM's own serving objects, on the engine's thread.

::

    admit:  body ─▶ vLLM's request model ─▶ serving object ─▶ asks for engine requests ─▶ ours are added; its task waits
    take:   final outputs ─▶ the task goes on ─▶ response

The private event loop runs only while a task has something to do that needs no engine, so that it never holds a step up.
"""

from __future__ import annotations

import asyncio
import traceback
from argparse import Namespace
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from enginepool.errors import Code, ItemError
from enginepool.payload import Answer, OpenAIRequest
from enginepool.worker.engine import RefusedItem
from enginepool.worker.openai_body import CHAT, COMPLETIONS, EMBEDDINGS, bad_request, plain_refusal, read_body
from enginepool.worker.vllm_serving import ASKER, build_serving

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.v1.engine.llm_engine import LLMEngine

Add = Callable[[str, Any, Any, dict[str, Any]], None]
"""(engine request id, prompt, params, options): adds one engine request, or raises."""
Handler = Callable[[Any], Awaitable[Any]]
CodeOf = Callable[[Exception], Code]
NOT_STREAMED = "Request must not be sent in stream mode"

_MODELS: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletionRequest),
    COMPLETIONS: TypeAdapter(CompletionRequest),
    EMBEDDINGS: TypeAdapter(EmbeddingRequest),
}


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Used(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


class Call:
    """One OpenAI request in the engine: its task, the engine requests that this asked for, and what came of them."""

    def __init__(self, lease: int, loop: asyncio.AbstractEventLoop, add: Add, notices: list[str]) -> None:
        self.notices = notices
        self.outputs: dict[str, Any] = {}
        self.is_structured = False
        self.has_asked = loop.create_future()
        self._loop = loop
        self._add = add
        self._lease = lease
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    @property
    def ids(self) -> list[str]:
        """The engine requests in the order of the prompts."""
        return list(self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether all final outputs are here."""
        return len(self.outputs) == len(self._waiting)

    @property
    def first(self) -> Any:
        """The output of the first prompt."""
        return self.outputs[self.ids[0]]

    def ask(self, prompt: Any, params: Any, options: dict[str, Any]) -> asyncio.Future[Any]:
        """Called by vLLM's serving object, once for each prompt, without a pause between them."""
        name = f"{self._lease}.{len(self._waiting)}" if self._waiting else str(self._lease)
        future = self._waiting[name] = self._loop.create_future()
        self.is_structured |= getattr(params, "structured_outputs", None) is not None
        self._add(name, prompt, params, options)
        if not self.has_asked.done():
            self.has_asked.set_result(None)
        return future

    def resolve(self) -> None:
        """Hand the outputs to the serving object, which reads them when the loop runs next."""
        for name, future in self._waiting.items():
            future.set_result(self.outputs[name])


class OpenAIServer:
    """Keeps vLLM's serving objects. `add` and `abort` reach the engine, `code_of` tells a too long prompt from other faults."""

    def __init__(self, engine: LLMEngine, arguments: Namespace, add: Add, abort: Callable[[list[str]], None], code_of: CodeOf) -> None:
        self._add = add
        self._abort = abort
        self._code_of = code_of
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Call, asyncio.Task[Any]] = {}
        self._state = self._loop.run_until_complete(build_serving(engine, arguments))
        self._handlers = _handlers(self._state)
        self._max_model_len = engine.model_config.max_model_len

    def admit(self, lease: int, request: OpenAIRequest) -> Call:
        """Have one request parsed, rendered and added. Raises RefusedItem with what vLLM's server would answer."""
        asked, notices = self._read(request)
        call = Call(lease, self._loop, self._add, notices)
        task = self._tasks[call] = self._loop.create_task(self._serve(call, self._handlers[request.url], asked))
        self._run(asyncio.wait({task, call.has_asked}, return_when=asyncio.FIRST_COMPLETED))
        if task.done():
            self._abort(call.ids)
            raise self._refusal(call, asked, self._tasks.pop(call))
        return call

    def take(self, call: Call, request_id: str, output: Any) -> Answer | ItemError | None:
        """Note one final output; with the last of them comes the response."""
        call.outputs[request_id] = output
        if not call.is_complete:
            return None
        call.resolve()
        task = self._tasks.pop(call)
        self._run(asyncio.wait({task}))
        try:
            response = task.result()
            return self._refused(response).error if isinstance(response, ErrorResponse) else _answer(response, call.notices)
        except RefusedItem as refused:
            return refused.error
        except Exception as error:  # a parser of tool calls, say, that the text has upset
            return self._refused(error).error

    def drop(self, call: Call) -> None:
        """Forget a request whose engine requests have been given up."""
        task = self._tasks.pop(call, None)
        if task is not None:
            task.cancel()
            self._run(asyncio.wait({task}))

    def close(self) -> None:
        """Stop what still waits, and close the loop."""
        for call in list(self._tasks):
            self.drop(call)
        self._run(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self, call: Call, handler: Handler, asked: Any) -> Any:
        ASKER.set(call)
        return await handler(asked)

    def _run(self, work: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(work)

    def _read(self, request: OpenAIRequest) -> tuple[Any, list[str]]:
        """The request as vLLM's model has it, and what there is to say of unknown keys. Raises RefusedItem."""
        if request.url not in self._handlers:
            raise plain_refusal(f"Model does not support endpoint: {request.url}")
        if request.is_stream:
            raise bad_request("responses in parts are not supported yet", "stream")
        try:
            asked = _MODELS[request.url].validate_python(read_body(request.body))
        except ValidationError as error:
            raise RefusedItem(**self._told(self._run(_invalid(error)).error)) from None
        except RefusedItem:
            raise
        except Exception as error:  # vLLM's checks raise errors of its own, and others where a value is of an odd type
            raise self._refused(error) from error
        unknown = list(asked.model_extra or ())
        if unknown and request.is_strict:
            raise bad_request(f"unknown key {unknown[0]!r} in the body", unknown[0])
        if getattr(asked, "stream", None):
            raise plain_refusal(NOT_STREAMED)
        return asked, [f"unknown key {name!r} in the body is ignored" for name in unknown]

    def _refusal(self, call: Call, asked: Any, task: asyncio.Task[Any]) -> RefusedItem:
        """Why a task ended before the engine had anything to do; of several prompts, which one was at fault."""
        error = task.exception()
        if isinstance(error, EngineDeadError):
            raise error
        at = self._prompt_at_fault(call, asked)
        cause = error if isinstance(error, Exception) else task.result()
        if _has_no_room(cause, asked):
            text = f"The prompt fills this model's maximum context length of {self._max_model_len} tokens; there is no room for an answer"
            cause = VLLMValidationError(text, parameter="input_tokens")
        return self._refused(cause, "" if at is None else f"prompt {at}: ")

    def _prompt_at_fault(self, call: Call, asked: Any) -> int | None:
        """Rendering tells no index, so each prompt is rendered by itself until one is refused."""
        prompts = getattr(asked, "prompt", None)
        if not isinstance(prompts, list) or len(prompts) < 2 or isinstance(prompts[0], int):
            return None
        if call.ids:
            return len(call.ids) - 1
        for index, prompt in enumerate(prompts):
            try:
                self._run(self._state.online_renderer.render_completion(asked.model_copy(update={"prompt": prompt})))
            except Exception:
                return index
        return None

    def _refused(self, cause: Any, prefix: str = "") -> RefusedItem:
        if isinstance(cause, Exception) and not isinstance(cause, VLLMClientError | ValueError):
            traceback.print_exception(cause)
        return RefusedItem(**self._told(_info_of(cause), prefix))

    def _told(self, info: ErrorInfo, prefix: str = "") -> dict[str, Any]:
        """The arguments of a RefusedItem that says what vLLM says."""
        message = prefix + (info.message or HTTPStatus(info.code).phrase)
        code = self._code_of(ValueError(message)) if info.code < 500 else Code.ENGINE_ERROR
        return {"code": code, "message": message, "status": info.code, "kind": info.type, "param": info.param}


def _handlers(state: State) -> dict[str, Handler]:
    """By their paths, the serving objects that there are for this model."""
    handlers: dict[str, Handler] = {}
    if chat := getattr(state, "openai_serving_chat", None):
        handlers[CHAT] = chat.create_chat_completion
    if completion := getattr(state, "openai_serving_completion", None):
        handlers[COMPLETIONS] = completion.create_completion
    if embedding := getattr(state, "serving_embedding", None):
        handlers[EMBEDDINGS] = embedding
    return handlers


def _has_no_room(cause: Any, asked: Any) -> bool:
    """Whether vLLM complains of a limit of 0 tokens that nobody has asked for: it is what the prompt has left."""
    limits = (getattr(asked, name, None) for name in ("max_tokens", "max_completion_tokens"))
    return isinstance(cause, VLLMValidationError) and (cause.parameter, cause.value) == ("max_tokens", 0) and 0 not in limits


async def _invalid(error: ValidationError) -> ErrorResponse:
    """What vLLM's HTTP server says of a body that its model does not take."""
    quiet = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False))))
    errors = [fault | {"loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
    response = await validation_exception_handler(quiet, RequestValidationError(errors))
    return ErrorResponse.model_validate_json(response.body)


def _info_of(cause: Any) -> ErrorInfo:
    if isinstance(cause, ErrorResponse):
        return cause.error
    if isinstance(cause, Exception):
        return create_error_response(cause).error
    return create_error_response(RuntimeError("vLLM answered without its engine")).error


def _answer(response: Any, notices: list[str]) -> Answer:
    """The response's bytes and usage. Raises RefusedItem for what is no JSON."""
    if isinstance(response, JSONResponse):
        body = bytes(response.body)
    elif isinstance(response, BaseModel):
        body = response.model_dump_json().encode()
    else:
        raise plain_refusal(NOT_STREAMED)
    usage = msgspec.json.decode(body, type=_Used).usage
    return Answer(body, usage.prompt_tokens, usage.completion_tokens or 0, notices)

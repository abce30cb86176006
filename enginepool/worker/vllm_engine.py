"""The real engine: one `vllm.LLM`, fed and stepped item by item. The only module of a running pool that imports vllm.

Checked on vLLM 0.32. Metrics are read by typed attribute without a default, so that a field vLLM renames fails a test
instead of blanking the numbers.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm
from vllm import LLM
from vllm.exceptions import VLLMClientError
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.utils import record_function_or_nullcontext

from enginepool.clock import monotonic
from enginepool.errors import Code, ItemError
from enginepool.handover import EngineSpec
from enginepool.payload import Answer, ChatRequest, GenerateRequest, GenerateResult, Logprobs, OpenAIRequest, Request, decode_params
from enginepool.status import Load
from enginepool.worker.engine import NO_TEMPLATE, EngineInfo, Event, Finished, RefusedItem, Scope, StartRefused, Streamed, hint_for
from enginepool.worker.given_up import GivenUp
from enginepool.worker.vllm_args import serving_arguments, split_arguments
from enginepool.worker.vllm_chat import ChatRenderer
from enginepool.worker.vllm_grammar import GrammarBackend
from enginepool.worker.vllm_openai import Call, OpenAIServer
from enginepool.worker.vllm_results import logprobs_of, parts_of, stamps_of
from enginepool.worker.vllm_serving import add_request
from enginepool.worker.vllm_stats import IterationTap

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

Report = Callable[[str], None]


class VllmEngine:
    """Keeps the lease number as the external request id; vLLM makes its own internal one from it."""

    def __init__(self, spec: EngineSpec, report: Report) -> None:
        args, frontend = split_arguments(spec)
        compiling = "" if args.get("enforce_eager") else ", compiling (a minute or more on CPUs; enforce_eager skips it)"
        report(f"loading {spec.name} with vLLM {vllm.__version__}{compiling}")
        try:
            self._llm = LLM(**args)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            if os.environ.get("VLLM_LOGGING_LEVEL") in (None, "INFO", "DEBUG"):
                traceback.print_exc()
            raise StartRefused("engine", f"vLLM could not load {spec.model}: {_first_lines(error)}{hint_for(error)}") from error
        self._engine = self._llm.llm_engine
        self._openai = self._serve(spec, frontend)
        self._has_stats = self._engine.log_stats
        if not self._has_stats:
            report("warning: disable_log_stats is set, so queued, scheduled, first_token and last_token stay empty")
        self._chat = ChatRenderer(self._llm, spec.request_format, self._render_text, _code_of)
        self._tap = IterationTap()
        if self._engine.logger_manager is not None:
            self._engine.logger_manager.stat_loggers.append(self._tap)
        self._grammar = GrammarBackend()
        self._given_up = GivenUp()
        self._items: dict[int, _Item] = {}
        self._totals = [0, 0]
        self._model = spec.name

    def _serve(self, spec: EngineSpec, frontend: dict[str, Any]) -> OpenAIServer:
        arguments = serving_arguments(spec, frontend, self._engine.vllm_config)
        try:
            return OpenAIServer(self._engine, arguments, self._add_openai, self._engine.abort_request, _code_of)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise StartRefused("usage", f"vLLM refuses how OpenAI requests are to be answered: {_first_lines(error)}") from error

    @property
    def info(self) -> EngineInfo:
        """The effective configuration, as vLLM settled it."""
        config = self._engine.vllm_config
        return EngineInfo(
            model=self._model,
            vocab_size=config.model_config.get_vocab_size(),
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            tasks=[str(task) for task in self._llm.supported_tasks],
            config={
                "dtype": str(config.model_config.dtype),
                "enforce_eager": config.model_config.enforce_eager,
                "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
                "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            },
        )

    @property
    def scope(self) -> Scope:
        """vLLM's own: a profiler scope under VLLM_CUSTOM_SCOPES_FOR_PROFILING or VLLM_NVTX_SCOPES_FOR_PROFILING."""
        scope: Scope = record_function_or_nullcontext
        return scope

    @property
    def has_unfinished(self) -> bool:
        """Whether vLLM holds requests."""
        return bool(self._engine.has_unfinished_requests())

    @property
    def step_lag(self) -> int:
        """Two where vLLM schedules a step before it returns the one before (asynchronous scheduling, a core of its own)."""
        return 2

    @property
    def progress(self) -> int:
        """By vLLM's statistics; without them only generated tokens count, so a long prompt looks like a stall."""
        return self._tap.progress if self._has_stats else sum(self.token_counts().values())

    def token_counts(self) -> dict[int, int]:
        """From vLLM's detokenizers, which count whether or not there are statistics; an item's samples are added up."""
        counts = dict.fromkeys(self._items, 0)
        for state in self._engine.output_processor.request_states.values():
            lease = _lease_of(state.external_req_id)
            if lease in counts and state.detokenizer is not None:
                counts[lease] += state.detokenizer.num_output_tokens()
        return counts

    def blocked(self) -> list[int]:
        """Items without a token whose schema vLLM may still be compiling; its statistics tell whether any item waits so."""
        if not self._tap.num_blocked:
            return []
        counts = self.token_counts()
        return [lease for lease, item in self._items.items() if item.is_structured and not counts[lease]]

    @property
    def core_pids(self) -> list[int]:
        """The engine-core processes; none in process."""
        resources = getattr(self._engine.engine_core, "resources", None)
        return [] if resources is None else [process.pid for process in resources.engine_manager.processes]

    def admit(self, lease: int, request: Request, arrived: float) -> None:
        """Render and add one item as `LLM.enqueue` and `LLM.enqueue_chat` do, or vLLM's server for OpenAI's API."""
        if isinstance(request, OpenAIRequest):
            call = self._openai.admit(lease, request)
            self._items[lease] = _Item(arrived, call=call, is_structured=call.is_structured)
            return
        try:
            params = self._params(request)
            self._engine.add_request(str(lease), self._render(request), params)
            self._grammar.check(params)
        except (EngineDeadError, RefusedItem):
            raise
        except Exception as error:  # whatever admission raises is this item's: nothing has been stepped with it
            if not isinstance(error, VLLMClientError):
                traceback.print_exc()
            self._engine.abort_request([str(lease)])
            raise RefusedItem(_code_of(error), _message_of(error)) from error
        is_structured = params.structured_outputs is not None
        self._items[lease] = _Item(arrived, is_chat=isinstance(request, ChatRequest), is_structured=is_structured)

    def step(self) -> list[Event]:
        """One vLLM step; FINAL_ONLY outputs come when they are finished, DELTA outputs whenever there is something new."""
        events = (self._finish(output) if output.finished else self._delta(output) for output in self._engine.step())
        return [event for event in events if event is not None]

    def abort(self, leases: list[int]) -> None:
        """vLLM gives no final output for an aborted request."""
        items = [(lease, self._items.pop(lease)) for lease in leases if lease in self._items]
        if items:
            self._engine.abort_request([name for lease, item in items for name in item.ids(lease)])
        for _, item in items:
            if item.call is not None:
                self._openai.drop(item.call)

    def load(self) -> Load:
        """vLLM's own gauges; without statistics only what was finished is known."""
        if not self._has_stats:
            unfinished = self._engine.get_num_unfinished_requests()
            return Load(unfinished, 0, self._totals[0], self._totals[1], None)
        is_idle = not self.has_unfinished  # the gauges keep what the last step saw
        values = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return Load(
            running=0 if is_idle else int(values["vllm:num_requests_running"]),
            waiting=0 if is_idle else int(values["vllm:num_requests_waiting"]),
            prompt_tokens=int(values["vllm:prompt_tokens"]),
            generation_tokens=int(values["vllm:generation_tokens"]),
            kv_cache_usage=0.0 if is_idle else float(values["vllm:kv_cache_usage_perc"]),
            iteration=self._tap.last,
        )

    def close(self) -> None:
        """Shut the core down, drop the engine, collect. A core in its own process is killed: vLLM would wait 5 s for it."""
        self._given_up.close()
        self._openai.close()
        core = self._engine.engine_core
        core.shutdown(timeout=0)
        del self._engine, self._llm, self._chat, self._openai
        gc.collect()

    def _add_openai(self, name: str, prompt: Any, params: Any, options: dict[str, Any]) -> None:
        add_request(self._engine, name, prompt, params, options)
        if isinstance(params, SamplingParams):
            self._grammar.check(params)

    def _render(self, request: GenerateRequest | ChatRequest) -> Any:
        if isinstance(request, ChatRequest):
            return self._chat.render(request)
        return self._render_text(request.prompt) if request.prompt is not None else self._render_ids(request.prompt_token_ids)

    def _render_text(self, prompt: str) -> Any:
        return self._render_prompt({"prompt": prompt})

    def _render_ids(self, ids: list[int] | None) -> Any:
        return self._render_prompt({"prompt_token_ids": ids})

    def _render_prompt(self, prompt: Any) -> Any:
        renderer = self._llm.renderer
        (rendered,) = renderer.render_cmpl([parse_model_prompt(self._llm.model_config, prompt)], renderer.default_cmpl_tok_params)
        return rendered

    def _params(self, request: GenerateRequest | ChatRequest) -> SamplingParams:
        fields = decode_params(request.params)
        if fields is None:
            params = self._llm.get_default_sampling_params()
        else:
            if fields.get("structured_outputs") is not None:
                fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
            if fields.get("repetition_detection") is not None:
                fields["repetition_detection"] = RepetitionDetectionParams(**fields["repetition_detection"])
            params = SamplingParams(**fields)
        params.output_kind = RequestOutputKind.DELTA if request.is_stream else RequestOutputKind.FINAL_ONLY
        return params

    def _delta(self, output: RequestOutput) -> Streamed:
        """What is new. vLLM hands the prompt's logprobs out once, later ones are empty; the result will want them."""
        lease = _lease_of(output.request_id)
        if output.prompt_logprobs:
            self._items[lease].prompt_logprobs = logprobs_of(output.prompt_logprobs)
        parts = parts_of(output)
        self._totals[1] += sum(len(part.token_ids) for part in parts)
        return Streamed(lease, parts)

    def _finish(self, output: Any) -> Finished | None:
        """What has come of an item; None while others of its engine requests run, or after one of them has failed."""
        finished = monotonic()
        lease = _lease_of(output.request_id)
        item = self._items.get(lease)
        if item is None:
            return None
        samples = output.outputs if isinstance(output.outputs, list) else []  # a pooling model's output is no list
        self._totals[0] += len(output.prompt_token_ids or ())
        self._totals[1] += sum(len(sample.token_ids) for sample in samples)
        if any(sample.finish_reason == "error" for sample in samples):
            self.abort([lease])
            error = self._given_up.error_of(lease, is_structured=item.is_structured)
            return Finished(lease, error, stamps_of(output.metrics, item.arrived, finished))
        result = self._result(output, item) if item.call is None else self._answer(output, item.call)
        if result is None:
            return None
        del self._items[lease]
        first = output if item.call is None else item.call.first
        return Finished(lease, result, stamps_of(getattr(first, "metrics", None), item.arrived, finished))

    def _result(self, output: RequestOutput, item: _Item) -> GenerateResult:
        return GenerateResult(
            parts_of(output),
            output.prompt_token_ids,
            logprobs_of(output.prompt_logprobs) or item.prompt_logprobs,
            output.num_cached_tokens,
            output.prompt if item.is_chat else None,
        )

    def _answer(self, output: Any, call: Call) -> GenerateResult | ItemError | None:
        answer = self._openai.take(call, output.request_id, output)
        return GenerateResult([], answer=answer) if isinstance(answer, Answer) else answer


class _Item:
    """What is remembered of an item in the engine."""

    __slots__ = ("arrived", "call", "is_chat", "is_structured", "prompt_logprobs")

    def __init__(self, arrived: float, *, is_structured: bool, is_chat: bool = False, call: Call | None = None) -> None:
        self.arrived = arrived
        self.call = call
        self.is_chat = is_chat
        self.is_structured = is_structured
        self.prompt_logprobs: Logprobs | None = None

    def ids(self, lease: int) -> list[str]:
        """The engine's ids of its requests."""
        return [str(lease)] if self.call is None else self.call.ids


def _lease_of(request_id: str) -> int:
    """An OpenAI request with several prompts is several engine requests: `7`, `7.1`, …"""
    return int(request_id.partition(".")[0])


def _first_lines(error: Exception) -> str:
    """The message without pydantic's pointers to its own manual."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("For further information"))[:2000] or type(error).__name__


def _code_of(error: Exception) -> Code:
    text = str(error)
    is_length = "maximum model length" in text or "maximum context length" in text or "max_model_len" in text
    return Code.CONTEXT_LENGTH_EXCEEDED if is_length else Code.INVALID_REQUEST


def _message_of(error: Exception) -> str:
    if isinstance(error, ChatTemplateResolutionError):
        return NO_TEMPLATE
    return str(error) if isinstance(error, VLLMClientError | ValueError) and str(error) else f"{type(error).__name__}: {error}"

"""The real engine: one `vllm.LLM`, fed and stepped item by item. The only module of a running pool that imports vllm.

Checked on vLLM 0.32. Metrics are read by typed attribute without a default, so that a field vLLM renames fails a test
instead of blanking the numbers.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm import LLM
from vllm.exceptions import VLLMClientError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from enginepool.clock import EngineStamps, monotonic
from enginepool.errors import Code
from enginepool.handover import EngineSpec
from enginepool.payload import CompletionOutput, GenerateRequest, GenerateResult, Logprob, Logprobs, decode_params
from enginepool.status import Load
from enginepool.worker.engine import EngineInfo, Finished, RefusedItem, StartRefused, hint_for
from enginepool.worker.vllm_args import engine_arguments

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.metrics.stats import RequestStateStats

Report = Callable[[str], None]


class VllmEngine:
    """Keeps the lease number as the external request id; vLLM makes its own internal one from it."""

    def __init__(self, spec: EngineSpec, report: Report) -> None:
        args = engine_arguments(spec)
        compiling = "" if args.get("enforce_eager") else ", compiling (a minute or more on CPUs; enforce_eager skips it)"
        report(f"loading {spec.name} with vLLM {vllm.__version__}{compiling}")
        try:
            self._llm = LLM(**args)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            if os.environ.get("VLLM_LOGGING_LEVEL") in (None, "INFO", "DEBUG"):
                traceback.print_exc()
            raise StartRefused("engine", f"vLLM could not load {spec.model}: {_first_lines(error)}{hint_for(error)}") from error
        self._engine = self._llm.llm_engine
        self._has_stats = self._engine.log_stats
        if not self._has_stats:
            report("warning: disable_log_stats is set, so queued, scheduled, first_token and last_token stay empty")
        self._arrived: dict[int, float] = {}
        self._totals = [0, 0]
        self._model = spec.name

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
    def has_unfinished(self) -> bool:
        """Whether vLLM holds requests."""
        return bool(self._engine.has_unfinished_requests())

    @property
    def core_pids(self) -> list[int]:
        """The engine-core processes; none in process."""
        resources = getattr(self._engine.engine_core, "resources", None)
        return [] if resources is None else [process.pid for process in resources.engine_manager.processes]

    def admit(self, lease: int, request: GenerateRequest, arrived: float) -> None:
        """Render and add one item as `LLM.enqueue` does."""
        try:
            params = self._params(request)
            prompt: Any = {"prompt_token_ids": request.prompt_token_ids} if request.prompt is None else {"prompt": request.prompt}
            renderer = self._llm.renderer
            (rendered,) = renderer.render_cmpl([parse_model_prompt(self._llm.model_config, prompt)], renderer.default_cmpl_tok_params)
            self._engine.add_request(str(lease), rendered, params)
        except EngineDeadError:
            raise
        except Exception as error:  # whatever admission raises is this item's: nothing has been stepped with it
            if not isinstance(error, VLLMClientError):
                traceback.print_exc()
            self._engine.abort_request([str(lease)])
            raise RefusedItem(_code_of(error), _message_of(error)) from error
        self._arrived[lease] = arrived

    def step(self) -> list[Finished]:
        """One vLLM step; FINAL_ONLY outputs come when they are finished."""
        return [self._finish(output) for output in self._engine.step() if output.finished]

    def abort(self, leases: list[int]) -> None:
        """vLLM gives no final output for an aborted request."""
        if leases:
            self._engine.abort_request([str(lease) for lease in leases])
        for lease in leases:
            self._arrived.pop(lease, None)

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
        )

    def close(self) -> None:
        """Shut the core down, drop the engine, collect. A core in its own process is killed: vLLM would wait 5 s for it."""
        core = self._engine.engine_core
        core.shutdown(timeout=0)
        del self._engine, self._llm
        gc.collect()

    def _params(self, request: GenerateRequest) -> SamplingParams:
        fields = decode_params(request.params)
        if fields is None:
            params = self._llm.get_default_sampling_params()
        else:
            if fields.get("structured_outputs") is not None:
                fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
            if fields.get("repetition_detection") is not None:
                fields["repetition_detection"] = RepetitionDetectionParams(**fields["repetition_detection"])
            params = SamplingParams(**fields)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    def _finish(self, output: RequestOutput) -> Finished:
        finished = monotonic()
        lease = int(output.request_id)
        stamps = _stamps(output.metrics, self._arrived.pop(lease), finished)
        outputs = [
            CompletionOutput(
                sample.index,
                sample.text,
                list(sample.token_ids),
                sample.finish_reason,
                sample.stop_reason,
                sample.cumulative_logprob,
                _logprobs(sample.logprobs),
            )
            for sample in sorted(output.outputs, key=lambda sample: sample.index)
        ]
        prompt_ids = output.prompt_token_ids
        self._totals[0] += len(prompt_ids or ())
        self._totals[1] += sum(len(sample.token_ids) for sample in outputs)
        return lease, GenerateResult(outputs, stamps, prompt_ids, _logprobs(output.prompt_logprobs), output.num_cached_tokens)


def _stamps(metrics: RequestStateStats | None, arrived: float, finished: float) -> EngineStamps:
    """Copy at receipt, since the metrics object is live; 0.0 means that the milestone was not reached."""
    if metrics is None:
        return EngineStamps(arrived=arrived, finished=finished)
    return EngineStamps(
        arrived=arrived,
        queued=metrics.queued_ts or None,
        scheduled=metrics.scheduled_ts or None,
        first_token=metrics.first_token_ts or None,
        last_token=metrics.last_token_ts or None,
        finished=finished,
        num_tokens=metrics.num_generation_tokens,
    )


def _logprobs(positions: Sequence[Any] | None) -> Logprobs | None:
    if positions is None:
        return None
    return [
        None if position is None else {token: Logprob(item.logprob, item.rank, item.decoded_token) for token, item in position.items()}
        for position in positions
    ]


def _first_lines(error: Exception) -> str:
    """The message without pydantic's pointers to its own manual."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("For further information"))[:2000] or type(error).__name__


def _code_of(error: Exception) -> Code:
    text = str(error)
    is_length = "maximum model length" in text or "maximum context length" in text or "max_model_len" in text
    return Code.CONTEXT_LENGTH_EXCEEDED if is_length else Code.INVALID_REQUEST


def _message_of(error: Exception) -> str:
    return str(error) if isinstance(error, VLLMClientError | ValueError) and str(error) else f"{type(error).__name__}: {error}"

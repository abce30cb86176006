"""Builds the engine a spec asks for, proves that it works, and describes it to the dispatcher."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from enginepool.clock import monotonic
from enginepool.errors import ItemError, sayable
from enginepool.handover import WorkerSpec
from enginepool.payload import GenerateRequest, OpenAIRequest, Request
from enginepool.protocol import Message, Ready, Stage
from enginepool.worker.engine import Engine, Finished, StartRefused, hint_for

PROOF_PARAMS = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1, "temperature": 0.0}))
PROOF_LEASE = 0


def boot(spec: WorkerSpec, send: Callable[[Message], None]) -> Engine:
    """Build the engine, and generate one token or embed one. Raises StartRefused when the arguments or the installation are at fault."""

    def report(text: str) -> None:
        send(Stage(sayable(text)))

    engine = _build(spec, report)
    report("generating a first token" if "generate" in engine.info.tasks else "embedding a first token")
    _prove(engine)
    return engine


def describe(engine: Engine) -> Ready:
    """What the dispatcher and `status` tell of this engine."""
    info = engine.info
    return Ready(info.model, info.vocab_size, info.max_model_len, info.max_num_seqs, info.tasks, info.config, thread_masks())


def thread_masks(task_dir: Path = Path("/proc/self/task")) -> dict[str, int]:
    """How many threads of this process may run on which CPUs: a late mask would have moved the main thread only."""
    masks: Counter[str] = Counter()
    for tid in os.listdir(task_dir):
        try:
            status = (task_dir / tid / "status").read_text()
        except OSError:
            continue
        masks[status.partition("Cpus_allowed_list:")[2].split("\n", 1)[0].strip()] += 1
    return dict(masks)


def _build(spec: WorkerSpec, report: Callable[[str], None]) -> Engine:
    if spec.engine.kind == "echo":
        from enginepool.worker.echo_engine import EchoEngine

        return EchoEngine(spec.engine.args, spec.index, spec.engine.request_format)
    report("importing vLLM")
    try:
        from enginepool.worker.vllm_engine import VllmEngine
    except (ImportError, OSError, RuntimeError) as error:
        # Companions of torch that are built for another one raise the latter two.
        kind = "missing" if isinstance(error, ImportError) else "engine"
        raise StartRefused(kind, f"vLLM is installed but can not be imported: {error}{hint_for(error)}") from error
    return VllmEngine(spec.engine, report)


def _proof(tasks: list[str]) -> Request:
    if "generate" in tasks:
        return GenerateRequest(None, [1], PROOF_PARAMS)
    if "embed" in tasks:
        return OpenAIRequest("/v1/embeddings", b'{"input": [1]}')
    raise StartRefused("usage", f"the model is there for {', '.join(tasks)}; a pool can be asked for text and for embeddings only")


def _prove(engine: Engine) -> None:
    engine.admit(PROOF_LEASE, _proof(engine.info.tasks), monotonic())
    while engine.has_unfinished:
        for event in engine.step():
            if isinstance(event, Finished) and isinstance(event.result, ItemError):
                raise StartRefused("engine", f"the engine could not generate a first token: {event.result}")

"""The demo as a command: prepare the model, run the bundled prompts on a pool, show texts, tables and totals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from enginepool.demo.model import MODEL_NAME, ensure_model
from enginepool.demo.prompts import PROMPTS, as_chat
from enginepool.demo.report import OutputLike, latency_table, make_console, output_lines, summary, worker_table

KV_BYTES_A_WORKER = 512 << 20


def run_demo(workers: int = 2, model: str | None = None, console: Console | None = None) -> int:
    """Run the bundled prompts on a pool of `workers` and show what came out; return 0, or 1 when any item failed.

    `model` is a folder or name for vLLM; left out, it is the embedded model, prepared on first use. A model of one's own gets the prompts
    as they stand, without the embedded model's chat form. Raises `EnginePoolError` when the model or the pool can't be started.
    """
    console = console or make_console()
    noun = "worker" if workers == 1 else "workers"
    console.print(
        f"enginepool demo: {len(PROMPTS)} prompts on {workers} {noun}, model {model or MODEL_NAME}", highlight=False, markup=False
    )
    if model is None:
        console.print("It is a tiny model (135M): what it says is fluent, and often wrong.", highlight=False, markup=False)
        ensure_model(lambda line: console.print(line, highlight=False, markup=False))
    outputs, wall_s = _generate(model, workers)
    show(outputs, wall_s, console)
    return 0 if all(output.ok for output in outputs) else 1


def show(outputs: Sequence[OutputLike], wall_s: float, console: Console) -> None:
    """Print texts, the two tables, the totals and where to go next."""
    console.print(output_lines(outputs), worker_table(outputs, wall_s), latency_table(outputs))
    console.print(summary(outputs, wall_s), highlight=False)
    console.print("Next: `enginepool serve --workers 2` keeps a pool running for other programs; README.md has the rest.", highlight=False)


def _generate(model: str | None, workers: int) -> tuple[Sequence[OutputLike], float]:
    # Imported here so that the demo's other parts cost nothing of the client.
    from enginepool import Pool, SamplingParams

    prompts = [as_chat(prompt.text) if model is None else prompt.text for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0) for prompt in PROMPTS]
    budget = KV_BYTES_A_WORKER * workers
    with Pool(model, workers=workers, enforce_eager=True, max_model_len=1024, kv_cache_budget_bytes=budget, progress=True) as pool:
        # Loading the engines is not part of the rate.
        started = time.monotonic()
        outputs = pool.generate_many(prompts, params, progress=True)
        return outputs, time.monotonic() - started

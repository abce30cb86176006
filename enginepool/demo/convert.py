"""Convert a GGUF file into a plain bf16 model folder: `python -m enginepool.demo.convert SRC DST`, a process of its own.

It is the only part of the demo that imports torch and transformers, and its output is shown only when it fails.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf`'s weights (dequantized to bf16), tokenizer, chat template and generation config to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Without dequantize=True the model can be run but not saved.
    quantization = GgufConfig(dequantize=True)
    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, quantization_config=quantization, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

"""What is wrong with a model's folder, told without loading it: missing files, broken links, files cut short."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from enginepool.config import PoolSettings
from enginepool.preflight.plan import engine_option

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_NO_VOCABULARY = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_INDEX = "model.safetensors.index.json"
_AGAIN = "copy or download the model again"
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library takes


def find_faults(folder: Path, settings: PoolSettings) -> Iterator[str]:
    """Each fault that keeps vLLM from loading this folder, with what to do."""
    if not os.access(folder, os.R_OK | os.X_OK):
        yield "the folder can't be read; check who may"
        return
    configs = [folder / name for name in ("config.json", "params.json")]
    if not any(path.exists() for path in configs):
        why = "config.json is a broken link" if configs[0].is_symlink() else "the folder has no config.json"
        yield f"{why}, so it is not a complete model; {_AGAIN}"
    # Other loaders and a config file of vLLM's own may take the weights from elsewhere.
    if not any(engine_option(settings, name) for name in ("load_format", "model_weights", "quantization", "config")):
        yield from _weight_faults(folder)
    if not any(engine_option(settings, name) for name in ("tokenizer", "skip_tokenizer_init", "config")) and not _has_vocabulary(folder):
        yield f"the folder has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …); {_AGAIN}, or name one with `-- --tokenizer`"


def _has_vocabulary(folder: Path) -> bool:
    """Only what no tokenizer is read from is told apart: a model's own code may use any name."""
    words = ("token", "vocab", "spiece", "sentencepiece", "tekken", "merges")
    names = [path.name for path in folder.iterdir() if path.exists() and path.name not in _NO_VOCABULARY]
    return any(name.endswith((".model", ".tiktoken", ".gguf")) or any(word in name for word in words) for name in names)


def _weight_faults(folder: Path) -> Iterator[str]:
    present = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    indexed = sorted(_indexed(folder))
    if not present and not indexed:
        yield f"the folder has no weights (*.safetensors, *.bin, *.pt); {_AGAIN}"
    if missing := [name for name in indexed if not (folder / name).exists()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"{missing[0]}{more} of {_INDEX} is missing; {_AGAIN}"
        return
    for path in [folder / name for name in indexed] or [path for path in present if path.suffix == ".safetensors"]:
        if fault := _file_fault(path):
            yield f"{path.name} {fault}; {_AGAIN}"


def _indexed(folder: Path) -> set[str]:
    try:
        return set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _file_fault(path: Path) -> str | None:
    if not path.exists():
        return "is a broken link"
    try:
        size = path.stat().st_size
        if size == 0:
            return "is empty"
        return _safetensors_fault(path, size)
    except OSError as error:
        return f"can't be read ({error.strerror})"


def _safetensors_fault(path: Path, size: int) -> str | None:
    """The header tells where the last tensor ends: https://huggingface.co/docs/safetensors (8 bytes of length, JSON, data)."""
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            return "is a Git LFS pointer, not the weights"
        length = int.from_bytes(start, "little")
        if length > _MAX_HEADER_BYTES:
            return "is not a safetensors file"
        try:
            tensors = json.loads(file.read(length))
            end = max((tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError):
            return "is not a safetensors file, or cut short"
    return f"is cut short: {size} of {8 + length + end} bytes" if size < 8 + length + end else None

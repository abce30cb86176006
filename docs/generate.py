"""Writes docs/settings.md from the settings structs and the error tables: `python docs/generate.py [--check]`."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from enginepool.config import PoolSettings, iter_settings
from enginepool.errors import Code, ExitCode, ItemError

TARGET = Path(__file__).resolve().parent / "settings.md"

HEAD = """\
# Settings, commands and codes

<!-- Written by docs/generate.py from enginepool/config.py and enginepool/errors.py. Change those, then run it. -->

## Where a setting comes from

`enginepool serve` merges four layers; the first that has a value wins:

1. the flag, `--batch-size 32`;
2. the environment, `ENGINEPOOL_BATCH_SIZE=32`;
3. the file given with `--config FILE.toml`, `batch_size = 32`;
4. the default.

A file may look like this. Engine arguments are a table of their own and go to the engine under the engine's own names:

```toml
model = "Qwen/Qwen3-0.6B"
workers = 2
drain_timeout_s = 60

[engine_args]
max_model_len = 1024
enforce_eager = true
```

Edge cases:

- An unknown key, a value of the wrong type and a number out of range are refused, with the layer and the setting named, before
  anything starts (exit code 2).
- `enginepool serve --print-settings` prints every effective setting with its origin and exits.
- `Pool(…)` takes the same names as keyword arguments and reads neither the environment nor a file. Every other keyword is an
  engine argument.
- Two settings differ between the two ways in: `log_level` is `warning` in `Pool`, `info` in `serve`; and `vllm_flags` is what
  stands after `--` on the command line.
- `ENGINEPOOL_ENDPOINT` serves both sides: `serve` listens there, and clients connect there. So does `ENGINEPOOL_KEYS`: `serve` needs the
  pool's file, clients take either ([security.md](security.md#from-other-machines)).
"""

COMMANDS = """\
## Commands

| command | what it does |
| --- | --- |
| `enginepool serve [MODEL] [settings] [-- vLLM flags]` | starts a pool and serves it until it is stopped; also `--config FILE.toml`, \
`--print-settings`, `--ready-fd N`, `--ready-file PATH`, `--die-with-parent` ([sidecar.md](sidecar.md)) |
| `enginepool run-batch -i IN -o OUT [MODEL] [settings] [-- vLLM flags]`, or with `--endpoint E` | runs an OpenAI batch file, \
here or in a running pool; the same command again goes on where it stopped ([run-batch.md](run-batch.md)) |
| `enginepool doctor [MODEL] [settings] [--json] [-- vLLM flags]` | tells what `serve` would meet with the same arguments, without \
starting anything ([doctor.md](doctor.md)) |
| `enginepool status [--json] [--watch [--interval-s S]] [--endpoint E] [--keys F]` | shows a running pool as a table or as one JSON \
object, once or in place ([watching.md](watching.md)) |
| `enginepool drain [--timeout-s S] [--endpoint E] [--keys F]` | lets a pool finish what it has, then stop; returns when it is gone |
| `enginepool stop [--endpoint E] [--keys F]` | stops a pool now; unfinished items are returned as retryable; waits up to 60 s |
| `enginepool keys FOLDER` | makes `pool.keys` and `client.keys` for a pool that is reached from other machines; overwrites nothing \
([security.md](security.md#from-other-machines)) |
| `enginepool demo [--workers N] [--model M]` | generates from bundled prompts and shows timings |
| `enginepool --version` | prints the version |

`python -m enginepool` is the same program.
"""

ENVIRONMENT = """\
## Environment

Beside one name for each setting (see the first table):

| name | read by | meaning | default |
| --- | --- | --- | --- |
| `ENGINEPOOL_ENDPOINT` | `serve`, `Pool.connect()`, `status`, `drain`, `stop` | the endpoint to serve or to connect to | \
`default.sock` in the run directory |
| `ENGINEPOOL_KEYS` | `serve`, and for tcp endpoints `Pool.connect()`, `status`, `drain`, `stop` | the keys file | unset |
| `ENGINEPOOL_RUN_DIR` | all | the run directory: sockets, locks and secrets, mode 0700 | `$XDG_RUNTIME_DIR/enginepool`, else \
`enginepool-UID` in the temp folder |
| `ENGINEPOOL_CACHE` | `demo`, `serve` without a model | where the converted embedded model is kept | \
`$XDG_CACHE_HOME/enginepool`, else `~/.cache/enginepool` |

`serve` warns of any other `ENGINEPOOL_…` variable, which is mostly a typing error. Names that Kubernetes makes for a service called
`enginepool` (`ENGINEPOOL_PORT`, `ENGINEPOOL_SERVICE_HOST`, …) are let be, and no name above is one of those.

What placement reads and removes of the environment is in [placement.md](placement.md).
"""

EXIT_MEANINGS = {
    ExitCode.OK: "done; for `serve`: drained or stopped as asked, or its parent program is gone",
    ExitCode.FAILED: "something else failed: an item of the demo, some lines of `run-batch`, a dispatcher that did not stop within 60 s",
    ExitCode.USAGE: "a flag, a setting or an engine argument is wrong, or the endpoint is held by another pool",
    ExitCode.START_FAILED: "no worker could boot, or fewer than `min_ready`",
    ExitCode.NO_DISPATCHER: "nothing answers at this endpoint, or it does not let this client in",
    ExitCode.ALL_WORKERS_FAILED: "the pool was up and all its workers have failed for good since, or it was lost in a call or under "
    "`status --watch`",
    ExitCode.ENGINE_MISSING: "vLLM is not installed or too old, or a package for the embedded model is missing",
    ExitCode.DRAIN_LIMIT: "a drain hit its limit (`serve` and `enginepool drain`); what was left was returned as retryable",
    ExitCode.OUTPUT_FAILED: "`run-batch`: the output can't be written (full disk, closed pipe); what was written stands",
    ExitCode.ALL_LINES_FAILED: "`run-batch`: all lines failed",
    ExitCode.INTERRUPTED: "interrupted; for `serve`: SIGINT came twice",
}

CODE_MEANINGS = {
    Code.INVALID_REQUEST: "the prompt or its sampling parameters make no sense to the client or to the engine",
    Code.CONTEXT_LENGTH_EXCEEDED: "the prompt is longer than the model's window",
    Code.RESULT_TOO_LARGE: "the result is over `max_frame_bytes`; ask for fewer logprobs or tokens",
    Code.ABORTED: "the caller cancelled it or went away",
    Code.DEADLINE_EXCEEDED: "its `deadline_s` passed",
    Code.TIMEOUT: "the call's `timeout_s` passed; or taking the item in took longer than `admit_timeout_s`, or it got no token for "
    "`stall_timeout_s`",
    Code.OVERLOADED: "the backlog is full, or this client's share of it",
    Code.DRAINING: "the pool is stopping: not accepted, or not finished in time",
    Code.ENGINE_ERROR: "vLLM gave the item up for a reason of its own (`finish_reason` error)",
    Code.WORKER_LOST: "it was found to kill workers, or it was a stream that had begun when its worker died",
    Code.POOL_LOST: "all workers have failed for good",
    Code.UNREADABLE_RESULT: "the client could not read what came back: other versions, or a broken worker",
}


def render() -> str:
    """The whole page as it should stand in docs/settings.md."""
    parts = [HEAD, "## All settings\n", _settings_table(), COMMANDS, _exit_codes(), _item_codes(), ENVIRONMENT]
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Write the page, or with `--check` compare it; returns 1 when it is stale, 2 for another argument."""
    if list(argv) not in ([], ["--check"]):
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    if not argv:
        TARGET.write_text(render(), encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == render():
        return 0
    print("docs/settings.md is stale: run python docs/generate.py", file=sys.stderr)
    return 1


def _settings_table() -> str:
    hints = get_type_hints(PoolSettings, include_extras=True)
    rows = []
    for item in iter_settings():
        kind = _type(item.type) + _bounds(hints[item.name].__metadata__)
        flag, env = (f"`{item.flag}`", f"`{item.env}`") if item.is_flag else ("after `--`" if item.name == "vllm_flags" else "–", "–")
        rows.append([f"`{item.name}`", flag, env, f"`{item.name}`", kind, _default(item.default), item.help])
    return _table(["name (Python)", "flag", "environment", "TOML key", "type", "default", "what it does"], rows)


def _exit_codes() -> str:
    rows = [[str(int(code)), f"`{code.name}`", EXIT_MEANINGS[code]] for code in ExitCode]
    return "## Exit codes\n\n" + _table(["code", "`ExitCode`", "meaning"], rows)


def _item_codes() -> str:
    rows = []
    for code in Code:
        error = ItemError(code, "")
        retry = "yes" if error.is_retryable else "no"
        rows.append([f"`{code.value}`", error.blame, str(error.http_status), retry, CODE_MEANINGS[code]])
    head = "## Error codes of an item\n\n`Output.error` has `code`, `message`, `blame`, `http_status` and `is_retryable`.\n\n"
    return head + _table(["`error.code`", "`blame`", "`http_status`", "`is_retryable`", "when"], rows)


def _type(kind: Any) -> str:
    """A type as people write it: `int or auto`, `vllm or echo`."""
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in get_args(kind) if one is not type(None))
    if hasattr(kind, "__metadata__"):
        return f"{_type(kind.__origin__)}{_bounds(kind.__metadata__)}"
    names = {dict: "table", list: "list of text", str: "text", int: "integer", float: "number"}
    return names[origin or kind]


def _bounds(metadata: Iterable[Any]) -> str:
    return "".join(f" {sign} {limit}" for meta in metadata for sign, limit in (("≥", meta.ge), (">", meta.gt)) if limit is not None)


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    return "empty" if value in ({}, []) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # In a table even a bar inside back-quotes ends the cell.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

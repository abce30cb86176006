"""An engine without a model: repeats the prompt, on a script of latencies and misbehaviour, for tests and benchmarks.

A text prompt's "tokens" are its UTF-8 bytes, so counts are exact. What it does beside echoing is asked for by engine
arguments (`EchoScript`) and, for one item, by `extra_args` of its SamplingParams: `fault` ("raise", "exit", "hang",
"segfault", "miscount") at token `at`, `worker` to restrict it to one worker, `once` naming a file that makes it happen only once.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from enginepool.clock import EngineStamps, monotonic
from enginepool.errors import Code
from enginepool.payload import CompletionOutput, GenerateRequest, GenerateResult, decode_params
from enginepool.status import Load
from enginepool.worker.engine import EngineInfo, Finished, RefusedItem, StartRefused


class EchoScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine arguments of the echo engine.

    `step_s` is how long one token of all running items takes; 0 finishes an item in one step. `fail_start` lists workers
    whose start is refused, `crash_start` workers that exit in it, `hang_start` workers that never finish it.
    """

    max_model_len: int = 4096
    max_num_seqs: int = 32
    step_s: float = 0.0
    start_s: float = 0.0
    fail_start: list[int] = []
    crash_start: list[int] = []
    hang_start: list[int] = []
    hang_close: bool = False
    stdout: str = ""


class _Running:
    __slots__ = ("arrived", "fault", "first_token", "num_tokens", "params", "prompt_ids", "scheduled", "text", "wanted")

    def __init__(self, text: str, prompt_ids: list[int], params: dict[str, Any], arrived: float) -> None:
        self.text = text
        self.prompt_ids = prompt_ids
        self.params = params
        self.fault: dict[str, Any] = params.get("extra_args") or {}
        self.wanted: int = params.get("max_tokens", 16) or len(prompt_ids)
        self.arrived = arrived
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.num_tokens = 0


class EchoEngine:
    """Runs up to `max_num_seqs` items at once, one token each a step."""

    def __init__(self, args: dict[str, Any], index: int) -> None:
        try:
            self._script = msgspec.convert(args, EchoScript)
        except msgspec.ValidationError as error:
            raise StartRefused("usage", f"echo engine arguments: {error}") from None
        self._index = index
        self._items: dict[int, _Running] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._is_miscounting = False
        self._start()

    @property
    def info(self) -> EngineInfo:
        """What the script says."""
        return EngineInfo("echo", 256, self._script.max_model_len, self._script.max_num_seqs, ["generate"])

    @property
    def has_unfinished(self) -> bool:
        """Whether items are in hand (a miscounting engine has forgotten them)."""
        return bool(self._items) and not self._is_miscounting

    @property
    def core_pids(self) -> list[int]:
        """It runs in this process."""
        return []

    def admit(self, lease: int, request: GenerateRequest, arrived: float) -> None:
        """Take an item, or refuse an impossible one as vLLM would."""
        params = decode_params(request.params) or {}
        ids = request.prompt_token_ids if request.prompt is None else list(request.prompt.encode())
        if not ids:
            raise RefusedItem(Code.INVALID_REQUEST, "the prompt is empty")
        if len(ids) >= self._script.max_model_len:
            limit = self._script.max_model_len
            raise RefusedItem(Code.CONTEXT_LENGTH_EXCEEDED, f"the prompt has {len(ids)} tokens, the model takes less than {limit}")
        text = request.prompt if request.prompt is not None else bytes(i % 256 for i in ids).decode("latin-1")
        item = self._items[lease] = _Running(text, ids, params, arrived)
        self._prompt_tokens += len(ids)
        if item.fault.get("fault") and item.fault.get("at", 0) == 0:
            self._misbehave(item.fault)

    def step(self) -> list[Finished]:
        """One token for each running item; with no step time, all tokens at once."""
        running = list(self._items.items())[: self._script.max_num_seqs]
        if self._script.step_s:
            time.sleep(self._script.step_s)
        now = monotonic()
        finished: list[Finished] = []
        for lease, item in running:
            self._advance(item, now)
            if item.num_tokens >= item.wanted:
                del self._items[lease]
                finished.append((lease, _result(item, now)))
        return finished

    def abort(self, leases: list[int]) -> None:
        """Forget these items."""
        for lease in leases:
            self._items.pop(lease, None)

    def load(self) -> Load:
        """Counts since the start."""
        running = min(len(self._items), self._script.max_num_seqs)
        return Load(running, len(self._items) - running, self._prompt_tokens, self._generation_tokens, 0.0)

    def close(self) -> None:
        """Nothing to release, unless the script says to hang."""
        while self._script.hang_close:
            time.sleep(3600)

    def _start(self) -> None:
        if self._script.stdout:
            print(self._script.stdout, flush=True)
        if self._index in self._script.fail_start:
            raise StartRefused("engine", "the script refuses this worker's start")
        if self._index in self._script.crash_start:
            os._exit(9)
        while self._index in self._script.hang_start:
            time.sleep(3600)
        if self._script.start_s:
            time.sleep(self._script.start_s)

    def _advance(self, item: _Running, now: float) -> None:
        item.scheduled = item.scheduled or now
        item.first_token = item.first_token or now
        step = 1 if self._script.step_s else item.wanted - item.num_tokens
        if item.fault.get("fault") and item.num_tokens < item.fault.get("at", 0) <= item.num_tokens + step:
            self._misbehave(item.fault)
        item.num_tokens += step
        self._generation_tokens += step

    def _misbehave(self, fault: dict[str, Any]) -> None:
        if fault.get("worker", self._index) != self._index or not _is_first_time(fault.get("once")):
            return
        match fault["fault"]:
            case "raise":
                raise RuntimeError("the script raises here")
            case "exit":
                os._exit(9)
            case "hang":
                while True:
                    time.sleep(3600)
            case "segfault":
                ctypes.string_at(0)
            case "miscount":
                self._is_miscounting = True


def _result(item: _Running, now: float) -> GenerateResult:
    text = (item.text * (item.wanted // max(1, len(item.text)) + 1))[: item.wanted]
    ids = (item.prompt_ids * (item.wanted // len(item.prompt_ids) + 1))[: item.wanted]
    outputs = [CompletionOutput(index, text, ids, "length") for index in range(item.params.get("n", 1))]
    stamps = EngineStamps(item.arrived, item.arrived, item.scheduled, item.first_token, now, monotonic(), item.num_tokens)
    return GenerateResult(outputs, stamps, item.prompt_ids)


def _is_first_time(marker: str | None) -> bool:
    if marker is None:
        return True
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

"""An engine without a model: repeats the prompt, on a script of latencies and misbehaviour, for tests and benchmarks.

A text prompt's "tokens" are its UTF-8 bytes, so counts are exact. What it does beside echoing is asked for by engine
arguments (`EchoScript`) and, for one item, by `extra_args` of its SamplingParams: `fault` (`echo_faults.py` lists them) at
token `at` (0: at admission), `worker` to restrict it to one worker, `once` naming a file that makes it happen only once.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from enginepool.chat_format import RequestFormat
from enginepool.clock import EngineStamps, monotonic
from enginepool.errors import Code
from enginepool.payload import ChatRequest, CompletionOutput, GenerateResult, OpenAIRequest, Request, decode_params
from enginepool.status import Load
from enginepool.worker.echo_chat import ECHO_TEMPLATE, render_echo
from enginepool.worker.echo_faults import misbehave
from enginepool.worker.echo_openai import answer_openai, read_openai
from enginepool.worker.engine import EngineInfo, Event, Finished, RefusedItem, Scope, StartRefused, Streamed


class EchoScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine arguments of the echo engine.

    `step_s` is how long one token of all running items takes; 0 finishes an item in one step. `fail_start` lists workers
    whose start is refused, `crash_start` workers that exit in it, `hang_start` workers that never finish it.
    `chat_template` is the template of its "model".
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
    chat_template: str | None = ECHO_TEMPLATE


class _Running:
    __slots__ = (
        "arrived",
        "fault",
        "first_token",
        "is_blocked",
        "is_chat",
        "is_starved",
        "is_stream",
        "num_sent",
        "num_tokens",
        "openai",
        "params",
        "prompt_ids",
        "scheduled",
        "text",
        "wanted",
    )

    def __init__(self, text: str, prompt_ids: list[int], params: dict[str, Any], arrived: float, request: Request) -> None:
        self.text = text
        self.is_chat = isinstance(request, ChatRequest)
        self.openai = request if isinstance(request, OpenAIRequest) else None
        self.is_stream = request.is_stream
        self.is_starved = self.is_blocked = False
        self.num_sent = 0
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

    def __init__(self, args: dict[str, Any], index: int, request_format: RequestFormat | None = None) -> None:
        self._format = request_format or RequestFormat()
        try:
            self._script = msgspec.convert(args, EchoScript)
        except msgspec.ValidationError as error:
            known = ", ".join(EchoScript.__struct_fields__)
            raise StartRefused("usage", f"echo engine arguments: {error}; the echo engine takes {known} (docs/echo.md)") from None
        self._index = index
        self._items: dict[int, _Running] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._is_miscounting = False
        self._is_spinning = False
        self._start()

    @property
    def info(self) -> EngineInfo:
        """What the script says."""
        return EngineInfo("echo", 256, self._script.max_model_len, self._script.max_num_seqs, ["generate"])

    @property
    def scope(self) -> Scope:
        """There is no profiler."""
        return nullcontext

    @property
    def has_unfinished(self) -> bool:
        """Whether items are in hand (a miscounting engine has forgotten them)."""
        return bool(self._items) and not self._is_miscounting

    @property
    def step_lag(self) -> int:
        """A step runs all that was admitted before it."""
        return 1

    @property
    def progress(self) -> int:
        """Tokens so far."""
        return self._prompt_tokens + self._generation_tokens

    def token_counts(self) -> dict[int, int]:
        """The tokens of each item so far."""
        return {lease: item.num_tokens for lease, item in self._items.items()}

    def blocked(self) -> list[int]:
        """Those that the script blocks."""
        return [lease for lease, item in self._items.items() if item.is_blocked]

    @property
    def core_pids(self) -> list[int]:
        """It runs in this process."""
        return []

    def admit(self, lease: int, request: Request, arrived: float) -> None:
        """Take an item, or refuse an impossible one as vLLM would."""
        try:
            text, ids, params = self._read(request)
            _check(params)
        except RefusedItem:
            raise
        except Exception as error:  # as in vllm_engine: whatever reading an item raises is that item's
            raise RefusedItem(Code.INVALID_REQUEST, f"{type(error).__name__}: {error}") from error
        if not ids:
            raise RefusedItem(Code.INVALID_REQUEST, "the prompt is empty")
        if len(ids) >= self._script.max_model_len:
            limit = self._script.max_model_len
            raise RefusedItem(Code.CONTEXT_LENGTH_EXCEEDED, f"the prompt has {len(ids)} tokens, the model takes less than {limit}")
        item = self._items[lease] = _Running(text, ids, params, arrived, request)
        self._prompt_tokens += len(ids)
        if item.fault.get("fault") and item.fault.get("at", 0) == 0:
            self._misbehave(item)

    def step(self) -> list[Event]:
        """One token for each running item; with no step time, all tokens at once."""
        if self._is_spinning:
            return []
        running = list(self._items.items())[: self._script.max_num_seqs]
        if self._script.step_s:
            time.sleep(self._script.step_s)
        now = monotonic()
        events: list[Event] = []
        for lease, item in running:
            self._advance(item, now)
            if item.is_starved:
                continue
            if item.num_tokens >= item.wanted:
                del self._items[lease]
                events.append(Finished(lease, *_result(item, now, lease)))
            elif item.is_stream:
                events.append(Streamed(lease, _parts(item, None)))
        return events

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

    def _read(self, request: Request) -> tuple[str, list[int], dict[str, Any]]:
        """Prompt as text and as token ids, and params."""
        if isinstance(request, OpenAIRequest):
            text, params = read_openai(request)
            return text, list(text.encode()), params
        params = decode_params(request.params) or {}
        if isinstance(request, ChatRequest):
            text = render_echo(request, self._format, self._script.chat_template)
            return text, list(text.encode()), params
        if request.prompt is not None:
            return request.prompt, list(request.prompt.encode()), params
        ids = request.prompt_token_ids or []
        return bytes(i % 256 for i in ids).decode("latin-1"), ids, params

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
            self._misbehave(item)
        if item.is_starved or self._is_spinning:
            return
        item.num_tokens += step
        self._generation_tokens += step

    def _misbehave(self, item: _Running) -> None:
        fault = item.fault
        if fault.get("worker", self._index) != self._index or not _is_first_time(fault.get("once")):
            return
        match fault["fault"]:
            case "miscount":
                self._is_miscounting = True
            case "spin":
                self._is_spinning = True
            case "starve" | "block":
                item.is_starved = True
                item.is_blocked = item.fault["fault"] == "block"
            case _:
                misbehave(fault)


def _check(params: dict[str, Any]) -> None:
    """The ranges that vLLM refuses most often, so that a rehearsal finds them too."""
    for name, least in (("n", 1), ("max_tokens", 1), ("temperature", 0.0)):
        value = params.get(name)
        if value is not None and value < least:
            raise RefusedItem(Code.INVALID_REQUEST, f"{name} must be at least {least}, got {value}")


def _result(item: _Running, now: float, lease: int) -> tuple[GenerateResult, EngineStamps]:
    stamps = EngineStamps(item.arrived, item.arrived, item.scheduled, item.first_token, now, monotonic(), item.num_tokens)
    if item.openai is not None:
        answer = answer_openai(item.openai, f"echo-{lease}", len(item.prompt_ids), _parts(item, "length"))
        return GenerateResult([], answer=answer), stamps
    return GenerateResult(_parts(item, "length"), item.prompt_ids, prompt=item.text if item.is_chat else None), stamps


def _parts(item: _Running, finish_reason: str | None) -> list[CompletionOutput]:
    """What has not been told yet: of a stream the new tokens, otherwise all."""
    new = slice(item.num_sent, item.num_tokens)
    item.num_sent = item.num_tokens
    text = (item.text * (item.num_tokens // max(1, len(item.text)) + 1))[new]
    ids = (item.prompt_ids * (item.num_tokens // len(item.prompt_ids) + 1))[new]
    return [CompletionOutput(index, text, ids, finish_reason) for index in range(item.params.get("n", 1))]


def _is_first_time(marker: str | None) -> bool:
    if marker is None:
        return True
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

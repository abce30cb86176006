"""One output line: the shape of `vllm run-batch` and OpenAI's Batch API, and an `enginepool` object with who answered and when."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from enginepool.batch.request import LineFault
from enginepool.client.outputs import Output
from enginepool.clock import Timings
from enginepool.errors import ItemError

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 413: "RequestEntityTooLargeError", 503: "ServiceUnavailableError"}
NULL = msgspec.Raw(b"null")
STAMPS = ("submitted", "received", "leased", "arrived", "queued", "scheduled", "first_token", "last_token", "finished", "delivered")
SPANS = ("queue_s", "ttft_s", "tpot_s", "e2e_s")


class Response(msgspec.Struct):
    """What came back; `body` is null on error."""

    status_code: int
    request_id: str
    body: msgspec.Raw = NULL


class OutputLine(msgspec.Struct):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: Response
    error: dict[str, Any] | None = None
    enginepool: dict[str, Any] | UnsetType = UNSET


class LineWriter:
    """Makes the output lines of one run. With `is_plain` they are what vLLM writes and nothing else."""

    def __init__(self, run: str, *, is_plain: bool) -> None:
        self._run = run
        self._is_plain = is_plain
        self._encode = msgspec.json.Encoder().encode

    def of_output(self, number: int, custom_id: str, output: Output) -> bytes:
        """The line of what a worker has answered, or of what kept it from answering."""
        error = output.error
        body = NULL if output.answer is None else msgspec.Raw(output.answer.body)
        response = Response(200 if error is None else error.http_status, _request_id(), body)
        facts = None if self._is_plain else _facts(number, output)
        return self._line(number, custom_id, response, None if error is None else _item_error(error), facts)

    def of_fault(self, number: int, fault: LineFault) -> bytes:
        """The line of one that was never sent."""
        error = error_object(f"line {number}: {fault.message}", fault.status, fault.param)
        facts = None if self._is_plain else {"line": number, "code": "invalid_request"}
        return self._line(number, fault.custom_id, Response(fault.status, _request_id()), error, facts)

    def _line(
        self, number: int, custom_id: str | None, response: Response, error: dict[str, Any] | None, facts: dict[str, Any] | None
    ) -> bytes:
        line = OutputLine(line_id(self._run, number), custom_id, response, error, UNSET if facts is None else facts)
        return self._encode(line) + b"\n"


def line_id(run: str, number: int) -> str:
    """The id of an output line: it names the run and the input line, which is how a run is continued."""
    return f"enginepool-{run}-{number}"


def error_object(message: str, status: int, param: str | None, kind: str | None = None) -> dict[str, Any]:
    """An error as vLLM's server words it (`ErrorResponse`)."""
    kind = kind or _KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _item_error(error: ItemError) -> dict[str, Any]:
    return error_object(error.message, error.http_status, error.param, error.kind)


def _facts(number: int, output: Output) -> dict[str, Any]:
    facts: dict[str, Any] = {"line": number, "worker": output.worker, "attempts": output.attempts, "timings": _timings(output.timings)}
    if output.error is not None:
        facts["code"] = output.error.code.value
    return facts


def _timings(timings: Timings) -> dict[str, float]:
    """Unix seconds of the milestones that were reached, and the spans between them in seconds, to the microsecond."""
    values = {name: getattr(timings, name) for name in (*STAMPS, *SPANS)}
    return {name: round(value, 6) for name, value in values.items() if value is not None}


def _request_id() -> str:
    return f"enginepool-batch-{uuid.uuid4().hex}"

"""One output line: the shape of `vllm run-batch` and OpenAI's Batch API, and an `enginepool` object with who answered and when."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from enginepool.batch.request import LineFault
from enginepool.client.outputs import Output
from enginepool.clock import Timings
from enginepool.errors import Code, ItemError

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 413: "RequestEntityTooLargeError", 503: "ServiceUnavailableError"}
NULL = msgspec.Raw(b"null")


class Response(msgspec.Struct):
    """What came back; `body` is null on error."""

    status_code: int
    request_id: str
    body: msgspec.Raw = NULL


class Facts(msgspec.Struct, omit_defaults=True):
    """Who answered a line and when: `timings` in Unix seconds (null where a milestone was not reached), the spans in seconds."""

    line: int
    worker: int | None = None
    attempts: int = 0
    code: str | None = None
    timings: Timings | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class OutputLine(msgspec.Struct):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: Response
    error: dict[str, Any] | str | None = None
    enginepool: Facts | UnsetType = UNSET


class LineWriter:
    """Makes the output lines of one run. With `is_plain` they are what vLLM writes and nothing else."""

    def __init__(self, run: str, *, is_plain: bool) -> None:
        self._run = run
        self._is_plain = is_plain
        self._encode = msgspec.json.Encoder().encode
        self._request_ids = map(f"enginepool-batch-{secrets.token_hex(8)}-{{:x}}".format, itertools.count(1))

    def of_output(self, number: int, custom_id: str, output: Output) -> bytes:
        """The line of what a worker has answered, or of what kept it from answering."""
        error = output.error
        body = NULL if output.answer is None else msgspec.Raw(output.answer.body)
        response = Response(200 if error is None else error.http_status, next(self._request_ids), body)
        facts = None if self._is_plain else _facts(number, output)
        return self._line(number, custom_id, response, None if error is None else _item_error(error), facts)

    def of_fault(self, number: int, fault: LineFault) -> bytes:
        """The line of one that was never sent."""
        error = fault.message if fault.is_text else error_object(f"line {number}: {fault.message}", fault.status, fault.param)
        facts = None if self._is_plain else Facts(number, code=Code.INVALID_REQUEST.value)
        return self._line(number, fault.custom_id, Response(fault.status, next(self._request_ids)), error, facts)

    def _line(
        self, number: int, custom_id: str | None, response: Response, error: dict[str, Any] | str | None, facts: Facts | None
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


def _item_error(error: ItemError) -> dict[str, Any] | str:
    """A refusal of vLLM's that has no kind is one that its run-batch words as text alone."""
    if error.status is not None and error.kind is None:
        return error.message
    return error_object(error.message, error.http_status, error.param, error.kind)


def _facts(number: int, output: Output) -> Facts:
    timings, error = output.timings, output.error
    code = None if error is None else error.code.value
    spans = (timings.queue_s, timings.ttft_s, timings.tpot_s, timings.e2e_s)
    return Facts(number, output.worker, output.attempts, code, timings, *spans)

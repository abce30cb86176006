"""Sends requests of OpenAI's API to a pool, and holds plain vLLM's `run-batch` against it."""

from __future__ import annotations

import json
from typing import Any

from enginepool import Output, Pool
from enginepool.client.flight import Flight, Job
from enginepool.client.mailbox import ThreadMailbox
from enginepool.client.openai import encode_openai, sequences_only
from enginepool.payload import OpenAIRequest

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
LIMITS = {"max_tokens": 6, "temperature": 0}


def chat(messages: Any, **extra: Any) -> OpenAIRequest:
    """A short greedy chat; a text is what the user says."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return OpenAIRequest(CHAT, json.dumps(LIMITS | {"messages": said} | extra).encode())


def completion(prompt: Any, **extra: Any) -> OpenAIRequest:
    """A short greedy completion."""
    return OpenAIRequest(COMPLETIONS, json.dumps(LIMITS | {"prompt": prompt} | extra).encode())


def raw(text: str, url: str = COMPLETIONS) -> OpenAIRequest:
    """A completion whose body has these members beside a prompt."""
    return OpenAIRequest(url, b'{"prompt": "x", "max_tokens": 3, ' + text.encode() + b"}")


def ask(pool: Pool, requests: list[OpenAIRequest]) -> list[Output]:
    """Send them all at once; their outputs in order."""
    return gather(*send(pool, requests))


def send(pool: Pool, requests: list[OpenAIRequest]) -> tuple[Flight, ThreadMailbox[Output]]:
    """Send them, and wait for nothing."""
    mailbox = ThreadMailbox[Output]()
    flight = Flight(pool._connection, encode_openai, mailbox)
    flight.start([Job(index, request, sequences_only(1)) for index, request in enumerate(requests)])
    return flight, mailbox


def gather(flight: Flight, mailbox: ThreadMailbox[Output]) -> list[Output]:
    """Wait for all that is under way."""
    outputs: list[Output] = []
    while flight.num_open:
        mailbox.wait(1)
        outputs += flight.advance()
    return sorted(outputs, key=lambda output: output.index)


def body_of(output: Output) -> dict[str, Any]:
    """The response of an item that has one."""
    assert output.error is None, output.error
    assert output.answer is not None
    body: dict[str, Any] = json.loads(output.answer.body, parse_constant=_refuse)
    return body


def texts_of(output: Output) -> list[str]:
    """What the choices say."""
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in body_of(output)["choices"]]


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")

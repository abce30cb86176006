"""What a client of somebody else's making can send: the pool checks it again, and templates run in a sandbox."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Serve

from enginepool import Code, Pool, SamplingParams, rundir
from enginepool.payload import ChatOptions, ChatRequest, decode_result
from enginepool.payload import encode as encode_payload
from enginepool.protocol import PROTOCOL_VERSION, Hello, Result, Submit, SubmitItem, Welcome, decode_to_client, encode
from enginepool.sampling import encode_params
from enginepool.transport import Dealer

URL = "http://127.0.0.1:9/x.png"
LONG = SamplingParams(max_tokens=200)


class RawClient:
    """Speaks the protocol and checks nothing."""

    def __init__(self, endpoint: str) -> None:
        self._dealer = Dealer(endpoint)
        self._num_sent = 0
        self._dealer.send([encode(Hello(PROTOCOL_VERSION, rundir.read_secret(endpoint), uuid.uuid4().bytes, os.getpid()))])
        assert isinstance(decode_to_client(self._receive()[0]), Welcome)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> tuple[Code | None, str]:
        """Send a conversation; returns the code and the words of its error, or None and its text."""
        raw = msgspec.Raw(msgspec.msgpack.encode(ChatOptions(**options)))
        request = ChatRequest(messages, raw, msgspec.Raw(encode_params(LONG)))
        self._num_sent += 1
        self._dealer.send([encode(Submit([SubmitItem(self._num_sent)])), encode_payload(request)])
        header, payload = self._receive()
        result = decode_to_client(header)
        assert isinstance(result, Result)
        error = result.items[0].error
        return (None, decode_result(payload).outputs[0].text) if error is None else (error.code, error.message)

    def close(self) -> None:
        self._dealer.close(0)

    def _receive(self) -> list[bytes]:
        for _ in range(200):
            if (frames := self._dealer.receive()) is not None:
                return frames
            self._dealer.wait(0.1)
        raise AssertionError("no answer")


@pytest.fixture(scope="module")
def client(echo_pool: Pool) -> Iterator[RawClient]:
    client = RawClient(echo_pool.endpoint)
    yield client
    client.close()


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"type": "image_url", "image_url": {"url": URL}}, id="image"),
        pytest.param({"image_url": URL}, id="image-without-type"),
        pytest.param({"text": "x", "image_url": URL}, id="image-beside-text"),
        pytest.param({"type": "text", "text": "x", "uuid": "1", "image_url": URL}, id="image-by-uuid"),
        pytest.param({"type": "prompt_embeds", "data": "AAAA"}, id="embeddings"),
        pytest.param({"type": ["text"], "text": "x"}, id="list-for-a-type"),
        pytest.param(["nested"], id="list"),
        pytest.param(5, id="number"),
    ],
)
def test_media_in_a_conversation_is_refused_by_the_worker_too(client: RawClient, part: Any) -> None:
    code, told = client.chat([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])
    assert code is Code.INVALID_REQUEST
    assert told.startswith("message 1: a content part ")
    assert "parts are text" in told


def test_dict_for_content_is_refused_by_the_worker(client: RawClient) -> None:
    assert client.chat([{"role": "user", "content": {"image_url": URL}}]) == (
        Code.INVALID_REQUEST,
        "message 0: content must be text or a list of parts",
    )


def test_path_for_a_template_is_not_read_by_the_worker(client: RawClient, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jinja"
    secret.write_text("{{ 'the secret' }}")
    code, told = client.chat([{"role": "user", "content": "x"}], request_format="model", chat_template=str(secret))
    assert code is Code.INVALID_REQUEST
    assert "no chat template named" in told


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ self._TemplateReference__context }}",
    "{% set _ = messages.append('x') %}",
    "{{ ('%s' | attr('__class__')) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% include '/etc/hostname' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_template_gets_out_of_its_sandbox_by_no_known_way(client: RawClient, template: str) -> None:
    code, told = client.chat([{"role": "user", "content": "x"}], request_format="model", chat_template=template + "{{ 1 }}")
    shown = told if code is None else ""
    assert code in (None, Code.INVALID_REQUEST)
    assert "class" not in shown
    assert "environ" not in shown
    assert os.uname().nodename not in shown


def test_template_that_shows_what_the_test_above_looks_for(client: RawClient) -> None:
    """It would be seen."""
    assert (
        "class environ" in client.chat([{"role": "user", "content": "x"}], request_format="model", chat_template="{{ 'class environ' }}")[1]
    )


def test_log_shows_no_prompts(serve: Serve, tmp_path: Path) -> None:
    """Not at the most talkative level, not of items that fail, and not when a worker dies with one in hand."""
    served = serve("--engine", "echo", "--log-level", "debug", "--max-restarts", "5")
    served.ready_line()
    words = "the words of nobody's business"
    with Pool.connect() as pool:
        assert pool.generate(words, LONG).ok
        assert not pool.generate(words * 500, LONG).ok
        assert not pool.chat([{"role": "user", "content": words}], LONG, chat_template="{{ raise_exception(messages[0].content) }}").ok
        assert not pool.chat([{"role": "user", "content": words}], LONG, chat_template="{{ messages[0].content.nothing.at_all }}").ok
        assert not pool.generate(words, {"max_tokens": 9, "extra_args": {"fault": "raise", "at": 2}}).ok
        with pool.stream(words, LONG) as stream:
            assert list(stream)
    served.process.terminate()
    _, stderr = served.finish()
    assert "exited with" in stderr
    assert "nobody's business" not in stderr


def test_neighbours_of_all_that_are_fine(client: RawClient, echo_pool: Pool) -> None:
    before = [worker.restarts for worker in echo_pool.status().workers]
    assert client.chat([{"role": "user", "content": "x"}])[0] is None
    assert echo_pool.chat([{"role": "user", "content": [{"type": "text", "text": "x"}]}], LONG).ok
    assert before == [0, 0]

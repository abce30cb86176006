"""What a client that was let in may not do, and what happens to it: named cases of what the fuzz finds by chance."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
from conftest import wait_for, worker_pids
from fuzz_messages import REQUEST
from raw_peer import RawPeer, back_of, raw_context, secret_of

from enginepool import Pool, PoolState, SamplingParams
from enginepool.clock import monotonic
from enginepool.payload import GenerateRequest
from enginepool.payload import encode as encode_payload
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Drain,
    Enroll,
    GetStatus,
    Ping,
    Pong,
    Refused,
    Rejected,
    Status,
    SubmitItem,
    Welcome,
    decode_to_worker,
    encode,
)

FIVE = SamplingParams(max_tokens=5)
ENDLESS = encode_payload(GenerateRequest("endless", None, msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 10**7}))))
Peer = Callable[..., RawPeer]


@pytest.fixture
def peer(echo_pool: Pool) -> Iterator[Peer]:
    """Make raw clients of the module's pool; they say goodbye at the end."""
    made: list[RawPeer] = []
    with raw_context() as context:

        def make(**options: Any) -> RawPeer:
            made.append(RawPeer(context, echo_pool.endpoint, secret_of(echo_pool), **options))
            return made[-1]

        yield make
        for one in made:
            one.leave()
    wait_for(lambda: echo_pool.status().clients == 1, "their goodbyes")


def _cut_off(peer: RawPeer) -> str:
    """Why it was cut off; it may come back."""
    while not isinstance(answer := peer.answer(), Rejected):
        pass
    peer.check()
    return answer.reason


def test_client_id_of_another_connection_is_refused_and_its_results_stay_its_own(peer: Peer) -> None:
    owner, thief = peer(client_id=b"mine"), peer(client_id=b"mine")
    owner.introduce()
    owner.submit(SubmitItem(0), payloads=[ENDLESS])
    thief.hello()
    reason = thief.answer()
    assert isinstance(reason, Rejected)
    assert "another connection has this client_id" in reason.reason
    owner.say([encode(Abort([0]))])
    assert owner.results(1) == {0: "aborted"}
    assert thief.socket.poll(0) == 0


@pytest.mark.parametrize("client_id", [b"", b"x" * 65], ids=["empty", "long"])
def test_client_id_that_is_none_is_refused(peer: Peer, client_id: bytes) -> None:
    stranger = peer(client_id=client_id)
    stranger.hello()
    reason = stranger.answer()
    assert isinstance(reason, Rejected)
    assert reason.reason == f"a client_id has 1 to 64 bytes, not {len(client_id)}"


def test_second_hello_begins_anew(echo_pool: Pool, peer: Peer) -> None:
    twice = peer()
    twice.introduce()
    twice.submit(SubmitItem(0), payloads=[ENDLESS])
    wait_for(lambda: echo_pool.status().in_flight == 1, "its item")
    twice.introduce()
    wait_for(lambda: echo_pool.status().in_flight == 0, "the abort")
    twice.submit(SubmitItem(0))
    assert twice.results(1) == {0: None}


@pytest.mark.parametrize("num_payloads", [0, 1, 3])
def test_submit_with_another_number_of_payloads_is_refused_whole(peer: Peer, num_payloads: int) -> None:
    odd = peer()
    odd.introduce()
    odd.submit(SubmitItem(5), SubmitItem(6), payloads=[REQUEST] * num_payloads)
    refused = odd.answer()
    assert isinstance(refused, Refused)
    assert (refused.seqs, refused.error.code.value) == ([5, 6], "invalid_request")
    odd.submit(SubmitItem(5))
    assert odd.results(1) == {5: None}


@pytest.mark.parametrize(
    ("item", "code"),
    [
        pytest.param(SubmitItem(-(2**63)), None, id="lowest seq"),
        pytest.param(SubmitItem(2**64 - 1), None, id="highest seq"),
        pytest.param(SubmitItem(0, -(2**63)), None, id="lowest priority"),
        pytest.param(SubmitItem(0, 2**64 - 1), None, id="highest priority"),
        pytest.param(SubmitItem(0, 0, math.inf), None, id="endless deadline"),
        pytest.param(SubmitItem(0, 0, 1e308), None, id="far deadline"),
        pytest.param(SubmitItem(0, 0, -math.inf), "deadline_exceeded", id="deadline before all time"),
        pytest.param(SubmitItem(0, 0, -1e308), "deadline_exceeded", id="deadline long ago"),
        pytest.param(SubmitItem(0, 0, 0.0), "deadline_exceeded", id="deadline now"),
        pytest.param(SubmitItem(0, 0, None, 2**64 - 1), None, id="most sequences"),
        pytest.param(SubmitItem(0, 0, None, -(2**63)), None, id="fewest sequences"),
    ],
)
def test_number_that_no_client_of_ours_sends_harms_nobody(echo_pool: Pool, peer: Peer, item: SubmitItem, code: str | None) -> None:
    odd = peer()
    odd.introduce()
    odd.submit(item)
    assert odd.results(1) == {item.seq: code}
    assert echo_pool.generate("hello", FIVE).text == "hello"


def test_items_of_others_can_not_be_aborted(peer: Peer) -> None:
    owner, other = peer(), peer()
    owner.introduce()
    other.introduce()
    owner.submit(SubmitItem(1), payloads=[ENDLESS])
    other.say([encode(Abort([1, -1, 2**64 - 1]))])
    other.check()
    owner.submit(SubmitItem(2))
    assert owner.results(1) == {2: None}
    owner.say([encode(Abort([1]))])
    assert owner.results(1) == {1: "aborted"}


@pytest.mark.parametrize("limit_s", [math.nan, -1.0, math.inf, 1e300])
def test_drain_with_a_limit_that_is_none_is_cut_off(echo_pool: Pool, peer: Peer, limit_s: float) -> None:
    odd = peer()
    odd.introduce()
    odd.say([encode(Drain(limit_s))])
    assert "limit_s" in _cut_off(odd)
    assert echo_pool.status().state is PoolState.READY


def test_header_without_measure_is_cut_off_unread(peer: Peer) -> None:
    odd = peer()
    odd.introduce()
    odd.say([encode(Abort([2**64 - 1] * 200_000))])
    assert _cut_off(odd) == "a message could not be read: a header of 1800012 bytes"


def test_reason_of_a_cut_off_does_not_echo_a_long_message(peer: Peer) -> None:
    odd = peer()
    odd.introduce()
    odd.say([msgspec.msgpack.encode(["x" * 50_000])])
    assert len(_cut_off(odd)) <= 300


def test_status_asked_for_without_pause_is_answered_and_slows_nobody_down(echo_pool: Pool, peer: Peer) -> None:
    curious = peer()
    curious.introduce()
    for token in range(5000):
        curious.say([encode(GetStatus(token))])
    started = monotonic()
    assert echo_pool.generate("hello", FIVE).text == "hello"
    assert monotonic() - started < 2.0
    answers = [curious.answer() for _ in range(5000)]
    assert [answer.token for answer in answers if isinstance(answer, Status)] == list(range(5000))


def test_status_after_a_submit_knows_of_it(peer: Peer) -> None:
    asker = peer()
    asker.introduce()
    tokens = range(40)
    for token in tokens:
        asker.submit(SubmitItem(token), payloads=[ENDLESS])
        asker.say([encode(GetStatus(token))])
    counts = [answer.status.backlog + answer.status.in_flight for answer in (asker.answer() for _ in tokens) if isinstance(answer, Status)]
    assert counts == [token + 1 for token in tokens]


def test_client_that_asks_and_asks_without_reading_is_cut_off() -> None:
    with Pool(engine="echo", workers=1, max_client_output_bytes=200_000) as pool, raw_context() as context:
        before = psutil.Process(pool.status().pid).memory_info().rss
        deaf = RawPeer(context, pool.endpoint, secret_of(pool), reads=False)
        deaf.introduce()
        wait_for(lambda: pool.status().clients == 2, "its session")
        ends_at = monotonic() + 20
        while pool.status().clients == 2:
            assert monotonic() < ends_at
            for token in range(2000):
                deaf.say([encode(Ping(token))])
        assert psutil.Process(pool.status().pid).memory_info().rss - before < 10e6
        assert pool.status().paused_clients == 0
        assert pool.generate("hello", FIVE).text == "hello"
        answers = [deaf.answer() for _ in range(100)]
        assert all(isinstance(answer, Pong) for answer in answers)


def test_place_of_a_worker_that_is_there_can_not_be_taken(echo_pool: Pool) -> None:
    worker = worker_pids(echo_pool)[0]
    with raw_context() as context:
        thief = RawPeer(context, back_of(echo_pool), secret_of(echo_pool))
        thief.say([encode(Enroll(PROTOCOL_VERSION, echo_pool.pool_id, secret_of(echo_pool), 0, worker))])
        assert decode_to_worker(thief.hear()) == Rejected("this dispatcher did not start you")
    assert {output.worker for output in echo_pool.generate_many(["hello"] * 100, FIVE)} == {0, 1}
    assert worker_pids(echo_pool)[0] == worker


def test_hello_is_all_that_a_stranger_may_say(peer: Peer) -> None:
    stranger = peer()
    for message in (Ping(1), GetStatus(1), Drain(), Abort([])):
        stranger.say([encode(message)])
        assert stranger.answer() == Rejected("the first message must be a Hello with this pool's secret")
    stranger.hello()
    welcome = stranger.answer()
    assert isinstance(welcome, Welcome)
    assert welcome.pid != os.getpid()

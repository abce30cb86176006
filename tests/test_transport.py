"""Sockets that never block and never drop silently: a slow peer has its queue, an unknown one is told, rubbish is cut off."""

from __future__ import annotations

import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from enginepool import transport
from enginepool.clock import monotonic
from enginepool.errors import SettingsError
from enginepool.transport import POLLIN, Dealer, Frames, Poller, Router

DEADLINE_S = 10.0
MAX_FRAME_BYTES = 10_000


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/x.sock"


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    router = Router(MAX_FRAME_BYTES, max_unsent_messages=1)
    router.bind(endpoint)
    yield router
    router.close(0)


@pytest.fixture
def dealer(endpoint: str, router: Router) -> Iterator[Dealer]:
    dealer = Dealer(endpoint)
    yield dealer
    dealer.close(0)


@pytest.fixture
def slow_peer(endpoint: str, router: Router) -> Iterator[zmq.Socket[bytes]]:
    """A peer that takes next to nothing until it is read."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 1)
    socket.connect(endpoint)
    socket.send(b"hello")
    yield socket
    socket.close(0)
    context.term()


def _receive(router: Router) -> tuple[bytes, list[bytes]] | None:
    poller = Poller()
    poller.register(router.socket, POLLIN)
    poller.poll(int(DEADLINE_S * 1000))
    return router.receive()


def _answer(dealer: Dealer) -> list[bytes] | None:
    ends_at = monotonic() + DEADLINE_S
    while (frames := dealer.receive()) is None and monotonic() < ends_at:
        dealer.wait(0.1)
    return frames


def _fill(router: Router, peer: bytes) -> int:
    """Send until the peer's own queue begins; returns how many were sent."""
    for count in range(1, 10_000):
        assert router.send(peer, [b"%d" % count, bytes(5000)])
        if router.queued_bytes(peer):
            return count
    raise AssertionError("the peer took everything")


def test_frames_arrive_as_they_were_sent(router: Router, dealer: Dealer) -> None:
    dealer.send([b"header", b"", b"payload"])
    received = _receive(router)
    assert received is not None
    peer, frames = received
    assert frames == [b"header", b"", b"payload"]
    assert router.send(peer, [b"answer", b"1", b"2"])
    assert _answer(dealer) == [b"answer", b"1", b"2"]


def test_receive_of_nothing_is_none_at_once(router: Router, dealer: Dealer) -> None:
    assert router.receive() is None
    assert dealer.receive() is None


def test_send_to_an_unknown_peer_says_so(router: Router) -> None:
    assert router.send(b"nobody", [b"x"]) is False
    assert router.queued_bytes(b"nobody") == 0
    assert router.retry_at == math.inf


def test_send_to_a_peer_that_has_left_says_so(endpoint: str, router: Router) -> None:
    dealer = Dealer(endpoint)
    dealer.send([b"hello"])
    received = _receive(router)
    assert received is not None
    dealer.close()
    ends_at = monotonic() + DEADLINE_S
    while router.send(received[0], [b"x"]):
        assert monotonic() < ends_at
        router.forget(received[0])
        router.socket.poll(5)


def test_slow_peer_gets_everything_in_order_from_its_queue(router: Router, slow_peer: zmq.Socket[bytes]) -> None:
    received = _receive(router)
    assert received is not None
    count = _fill(router, received[0])
    assert router.send(received[0], [b"%d" % (count + 1), b""])
    got: list[int] = []
    ends_at = monotonic() + DEADLINE_S
    while len(got) <= count and monotonic() < ends_at:
        router.flush(monotonic())
        if slow_peer.poll(5):
            got.append(int(slow_peer.recv_multipart()[0]))
    assert got == list(range(1, count + 2))
    assert (router.queued_bytes(received[0]), router.retry_at) == (0, math.inf)


def test_slow_peers_queue_is_weighed_frame_by_frame(router: Router, slow_peer: zmq.Socket[bytes]) -> None:
    received = _receive(router)
    assert received is not None
    peer = received[0]
    _fill(router, peer)
    before = router.queued_bytes(peer)
    assert router.send(peer, [b"header", b"", b""])
    assert router.queued_bytes(peer) == before + 6 + 3 * transport.FRAME_OVERHEAD


def test_nothing_is_kept_for_a_peer_that_may_be_dropped(router: Router, slow_peer: zmq.Socket[bytes]) -> None:
    received = _receive(router)
    assert received is not None
    for _ in range(1000):
        router.send_or_drop(received[0], [bytes(5000)])
    router.send_or_drop(b"nobody", [b"x"])
    assert (router.queued_bytes(received[0]), router.retry_at) == (0, math.inf)


def test_flush_asks_a_peer_that_takes_nothing_less_and_less_often(router: Router, slow_peer: zmq.Socket[bytes]) -> None:
    received = _receive(router)
    assert received is not None
    _fill(router, received[0])
    waits, now = [], 0.0
    for _ in range(6):
        router.flush(now)
        waits.append(router.retry_at - now)
        now = router.retry_at
    assert waits == sorted(waits)
    assert (round(waits[0], 6), round(waits[-1], 6)) == (2 * transport.FIRST_RETRY_S, transport.LAST_RETRY_S)


def test_flush_tells_of_a_peer_that_left_with_its_queue_full(endpoint: str, router: Router) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as leaver:
        leaver.setsockopt(zmq.RCVHWM, 1)
        leaver.setsockopt(zmq.RCVBUF, 1)
        leaver.connect(endpoint)
        leaver.send(b"hello")
        received = _receive(router)
        assert received is not None
        _fill(router, received[0])
        leaver.close(0)
    gone: list[bytes] = []
    ends_at = monotonic() + DEADLINE_S
    while not gone and monotonic() < ends_at:
        router.socket.poll(5)
        gone = router.flush(math.inf)
    assert (gone, router.retry_at) == ([received[0]], math.inf)


def test_slow_peer_holds_nobody_else_up(router: Router, slow_peer: zmq.Socket[bytes], dealer: Dealer) -> None:
    received = _receive(router)
    assert received is not None
    _fill(router, received[0])
    dealer.send([b"hello"])
    other = _receive(router)
    assert other is not None
    assert router.send(other[0], [b"quick"])
    assert _answer(dealer) == [b"quick"]


def test_forget_drops_what_waits_for_a_peer(router: Router, slow_peer: zmq.Socket[bytes]) -> None:
    received = _receive(router)
    assert received is not None
    _fill(router, received[0])
    router.forget(received[0])
    assert router.queued_bytes(received[0]) == 0


def test_oversize_frame_is_cut_off_and_others_go_on(endpoint: str, router: Router, dealer: Dealer) -> None:
    offender = Dealer(endpoint)
    offender.send([b"header", bytes(MAX_FRAME_BYTES + 1)])
    dealer.send([b"fine", bytes(MAX_FRAME_BYTES)])
    received = _receive(router)
    offender.close(0)
    assert received is not None
    assert received[1] == [b"fine", bytes(MAX_FRAME_BYTES)]
    assert router.receive() is None


def test_bind_makes_a_socket_for_this_user_only(router: Router, endpoint: str) -> None:
    assert stat.S_IMODE(os.stat(endpoint.removeprefix("ipc://")).st_mode) & 0o077 == 0


def test_bind_returns_the_port_the_kernel_gave() -> None:
    router = Router(1000)
    port = int(router.bind("tcp://127.0.0.1:0").rpartition(":")[2])
    router.close(0)
    assert port > 0


def test_bind_where_that_is_impossible_names_the_endpoint(tmp_path: Path) -> None:
    router = Router(1000)
    with pytest.raises(SettingsError, match=r"nowhere/x\.sock: "):
        router.bind(f"ipc://{tmp_path}/nowhere/x.sock")
    router.close(0)


def test_dealer_with_nonsense_for_an_endpoint_is_refused() -> None:
    with pytest.raises(SettingsError, match="nonsense"):
        Dealer("nonsense")


def test_dealer_wait_ends_on_wake_and_watched_descriptor(dealer: Dealer) -> None:
    readable, writable = os.pipe()
    dealer.watch(readable)
    dealer.wake()
    assert readable not in dealer.wait(DEADLINE_S)
    os.write(writable, b"x")
    assert readable in dealer.wait(DEADLINE_S)
    dealer.unwatch(readable)
    assert readable not in dealer.wait(0)
    os.close(readable)
    os.close(writable)


def test_dealer_after_close_sends_nothing_and_does_not_fail(endpoint: str, router: Router) -> None:
    dealer = Dealer(endpoint)
    dealer.close(0)
    dealer.close(0)
    dealer.send([b"too late"])
    with suppress(OSError):
        dealer.wake()
    assert router.receive() is None


def test_dealer_send_soon_is_sent_like_any_other(router: Router, dealer: Dealer) -> None:
    dealer.send_soon([b"header", b"payload"])
    received = _receive(router)
    assert received is not None
    assert received[1] == [b"header", b"payload"]


def _next_frames(router: Router) -> list[bytes]:
    received = _receive(router)
    assert received is not None
    return received[1]


@pytest.mark.parametrize("release", ["send", "receive", "send_soon"])
def test_dealer_send_soon_under_its_own_lock_waits_for_the_next_use(router: Router, dealer: Dealer, release: str) -> None:
    with dealer._lock:  # as a finalizer finds it that runs in the middle of a send
        dealer.send_soon([b"first"])
        dealer.send_soon([b"second"])
    if release == "send":
        dealer.send([b"other"])
    elif release == "receive":
        dealer.receive()
    else:
        dealer.send_soon([b"other"])
    got = {tuple(_next_frames(router)) for _ in range(2 if release == "receive" else 3)}
    assert {(b"first",), (b"second",)} <= got


def test_dealer_send_soon_keeps_its_order(router: Router, dealer: Dealer) -> None:
    with dealer._lock:
        for number in range(5):
            dealer.send_soon([b"%d" % number])
    dealer.receive()
    assert [_next_frames(router) for _ in range(5)] == [[b"%d" % number] for number in range(5)]


def test_dealer_send_soon_of_many_threads_loses_nothing(router: Router, dealer: Dealer) -> None:
    def send(name: int) -> None:
        for number in range(500):
            (dealer.send_soon if number % 3 else dealer.send)([b"%d" % name, b"%d" % number])

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    got = {tuple(_next_frames(router)) for _ in range(2000)}
    for thread in threads:
        thread.join()
    assert len(got) == 2000


def test_dealer_send_soon_after_close_is_dropped(endpoint: str, router: Router) -> None:
    dealer = Dealer(endpoint)
    dealer.close(0)
    dealer.send_soon([b"too late"])
    assert router.receive() is None
    assert not dealer._later


class Interrupted(BaseException):
    """What a signal handler raises."""


@pytest.mark.parametrize("frames_sent", [0, 1, 2, 3], ids=["before", "after-the-header", "after-a-payload", "after-all"])
def test_message_cut_by_an_interrupt_is_dropped_whole_and_the_next_arrives(
    router: Router, dealer: Dealer, monkeypatch: pytest.MonkeyPatch, frames_sent: int
) -> None:
    plain = transport._send

    def cut(socket: zmq.Socket[bytes], frames: Frames, flags: int) -> None:
        for frame in frames[:frames_sent]:
            socket.send(frame, flags | (zmq.SNDMORE if frame is not frames[-1] else 0))
        raise Interrupted

    monkeypatch.setattr(transport, "_send", cut)
    with pytest.raises(Interrupted):
        dealer.send([b"header", b"one", b"two"])
    monkeypatch.setattr(transport, "_send", plain)
    dealer.send([b"next", b"payload"])
    if frames_sent == 3:
        assert _next_frames(router) == [b"header", b"one", b"two"]
    assert _next_frames(router) == [b"next", b"payload"]
    assert router.receive() is None


def test_router_that_gets_nothing_but_cut_messages_hands_control_back(router: Router, dealer: Dealer) -> None:
    for _ in range(2 * transport.MAX_CUTS_AT_ONCE):
        dealer.send([b"header", transport.CUT])
    dealer.send([b"whole"])
    assert _next_frames(router) == []
    ends_at = monotonic() + DEADLINE_S
    while (frames := _next_frames(router)) == [] and monotonic() < ends_at:
        pass
    assert frames == [b"whole"]


def test_dealer_wake_takes_no_lock(dealer: Dealer) -> None:
    with dealer._lock:
        dealer.wake()
    assert dealer.wait(5) != []

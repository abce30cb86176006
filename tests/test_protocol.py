"""Every message survives the wire in its own direction, anything else is refused, and the hot ones stay small."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from enginepool import protocol
from enginepool.clock import ClockAnchor, EngineStamps, decode_stamps, encode_stamps
from enginepool.errors import Code, ItemError
from enginepool.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Delta,
    Done,
    DoneItem,
    Drain,
    Enroll,
    GetStatus,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Limits,
    Message,
    Ping,
    Pong,
    Ready,
    Refused,
    Rejected,
    Result,
    ResultItem,
    Stage,
    StartFailed,
    Status,
    Stop,
    Stopping,
    Submit,
    SubmitItem,
    Welcome,
    Window,
    encode,
)
from enginepool.status import Iteration, Load, PoolState, PoolStatus, WorkerState, WorkerStatus

STAMPS = msgspec.Raw(encode_stamps(EngineStamps(1.5, 2.5)))
ERROR = ItemError(Code.WORKER_LOST, "no")
WORKER = WorkerStatus(0, 42, WorkerState.READY, "ready", 1, 1, 0, 0, None, [0, 1], ["0"], 10, 20, 1.5, 2.5, 0.25, 1 << 30)
STATUS = PoolStatus("id", 41, PoolState.DEGRADED, "why", "m", "ipc:///x", 1.0, 2, 3, 4, 5, 6, 7, 0.1, 8, 9, [WORKER])
WELCOME = Welcome(1, "id", 41, "m", "ipc:///x", Limits(1 << 20, 1024), 4096, ClockAnchor(1.0, 2.0, 0.1))

FROM_CLIENT: list[Message] = [
    Hello(1, b"secret", b"client", 42),
    Submit([SubmitItem(1), SubmitItem(2, -3, 0.5, 4)]),
    Abort([1, 2]),
    GetStatus(7),
    Drain(None),
    Drain(2.5),
    Stop(),
    Ping(7),
    Bye(),
]
TO_CLIENT: list[Message] = [
    WELCOME,
    Rejected("why"),
    Refused([1, 2], ERROR),
    Delta([1, 2]),
    Result([ResultItem(1, 0, 2, 10.5, None), ResultItem(2, None, 0, 10.5, 11.5, ERROR), ResultItem(3, 0, 1, 1.5, 2.5, None, STAMPS)]),
    Status(7, STATUS),
    Stopping(7, 12),
    Pong(7),
]
FROM_WORKER: list[Message] = [
    Enroll(1, "id", b"secret", 0, 42),
    Stage("loading"),
    StartFailed("usage", "bad argument"),
    Ready("m", 32000, 4096, 128, ["generate"], {"dtype": "bfloat16"}, {"0-1": 8}),
    Window(128, 8),
    Delta([1, 2]),
    Done([DoneItem(1), DoneItem(2, ERROR), DoneItem(3, None, STAMPS)]),
    Heartbeat(Load(1, 2, 3, 4, 0.5)),
    Heartbeat(Load(1, 2, 3, 4, 0.5, Iteration(7, 1, 200, 3, 3, 0.01))),
    Goodbye(None),
    Goodbye("why"),
]
TO_WORKER: list[Message] = [Lease([1, 2, 3]), Abort([1]), Drain(), Stop(), Rejected("why")]

Decode = Callable[[bytes], Message]
DIRECTIONS: list[tuple[Decode, list[Message], object]] = [
    (protocol.decode_from_client, FROM_CLIENT, protocol.ClientMessage),
    (protocol.decode_to_client, TO_CLIENT, protocol.ToClient),
    (protocol.decode_from_worker, FROM_WORKER, protocol.WorkerMessage),
    (protocol.decode_to_worker, TO_WORKER, protocol.ToWorker),
]
NAMES = ["from-client", "to-client", "from-worker", "to-worker"]


@pytest.mark.parametrize(("decode", "messages", "union"), DIRECTIONS, ids=NAMES)
def test_messages_round_trip(decode: Decode, messages: list[Message], union: object) -> None:
    assert [decode(encode(message)) for message in messages] == messages


@pytest.mark.parametrize(("decode", "messages", "union"), DIRECTIONS, ids=NAMES)
def test_messages_of_this_file_are_all_there_are(decode: Decode, messages: list[Message], union: object) -> None:
    assert {type(message) for message in messages} == set(get_args(union))


@pytest.mark.parametrize(("decode", "messages", "union"), DIRECTIONS, ids=NAMES)
def test_messages_of_other_directions_are_refused(decode: Decode, messages: list[Message], union: object) -> None:
    mine = {type(message) for message in messages}
    foreign = [message for _, others, _ in DIRECTIONS for message in others if type(message) not in mine]
    for message in foreign:
        with pytest.raises(msgspec.ValidationError, match="Invalid value"):
            decode(encode(message))


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(msgspec.msgpack.encode(["Surprise", 1]), id="unknown-tag"),
        pytest.param(msgspec.msgpack.encode({"type": "Ping"}), id="map"),
        pytest.param(msgspec.msgpack.encode([]), id="no-tag"),
        pytest.param(msgspec.msgpack.encode(["Ping"]), id="missing-field"),
        pytest.param(msgspec.msgpack.encode(["Ping", "x"]), id="wrong-type"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1\xff\x00", id="no-msgpack"),
        pytest.param(encode(Submit([SubmitItem(1)]))[:-1], id="torn"),
    ],
)
def test_rubbish_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        protocol.decode_from_client(frame)


def test_field_appended_by_a_later_version_is_ignored() -> None:
    assert protocol.decode_from_client(msgspec.msgpack.encode(["Ping", 7, "new"])) == Ping(7)


@pytest.mark.parametrize(
    ("message", "max_bytes"),
    [
        pytest.param(Submit([SubmitItem(1_000_000)]), 20, id="submit"),
        pytest.param(Lease([1_000_000]), 16, id="lease"),
        pytest.param(Delta([1_000_000]), 16, id="delta"),
        pytest.param(Done([DoneItem(1_000_000)]), 16, id="done"),
        pytest.param(Result([ResultItem(1_000_000, 1, 1, 1e5 / 3, 1e5 / 7)]), 40, id="result"),
        pytest.param(Heartbeat(Load(100, 100, 10**9, 10**9, 1 / 3)), 40, id="heartbeat"),
    ],
)
def test_hot_message_stays_small(message: Message, max_bytes: int) -> None:
    assert len(encode(message)) <= max_bytes


def test_payload_frames_follow_exactly_the_messages_with_items() -> None:
    everything = FROM_CLIENT + TO_CLIENT + FROM_WORKER + TO_WORKER
    assert {type(message) for message in everything if message.has_payload} == {Submit, Delta, Result, Done, Lease}


def test_version_is_the_one_with_streams() -> None:
    assert PROTOCOL_VERSION == 2


def test_stamps_travel_as_they_were_and_nil_where_there_are_none() -> None:
    decoded = protocol.decode_from_worker(encode(Done([DoneItem(1, None, STAMPS), DoneItem(2)])))
    assert isinstance(decoded, Done)
    assert [decode_stamps(item.stamps) for item in decoded.items] == [EngineStamps(1.5, 2.5), None]

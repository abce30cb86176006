"""Seeded rubbish for both sockets: noise, broken versions of every message, numbers no field expects, lengths that lie."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from enginepool.payload import GenerateRequest
from enginepool.payload import encode as encode_payload
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
    Message,
    Ping,
    Ready,
    Stage,
    StartFailed,
    Stop,
    Submit,
    SubmitItem,
    Window,
    decode_from_client,
    encode,
)
from enginepool.status import Load

Frames = list[bytes]

NUMBERS: Sequence[Any] = (
    *(0, 1, -1, 127, 128, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf),
)
WRONG: Sequence[Any] = (None, True, "", "x" * 300, b"", b"\xff" * 300, [], [[]], {}, {"a": 1}, {1: [2]}, *NUMBERS)
LIES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff",
)
"""Heads of an array, a map, a text, bytes and an extension that announce gigabytes; nothing follows."""
REQUEST = encode_payload(GenerateRequest("hello", None, msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 3}))))


class Fuzz:
    """Draws messages. `secret` is the pool's, for those that a peer may send once it was let in; `is_back` for the workers' socket."""

    def __init__(self, seed: int, secret: bytes, *, is_back: bool = False) -> None:
        self.draw = random.Random(seed)
        self.secret = secret
        self._corpus: list[Frames] = _worker_messages(secret) if is_back else _client_messages(secret)
        self._kinds: list[Callable[[], Frames]] = [self.noise, self.tiny, self.flipped, self.cut, self.reshaped, self.wrong, self.numbers]
        self._kinds += [self.bomb, self.lie, self.valid]

    def message(self) -> Frames:
        """Any message at all, never one that ends the pool on purpose."""
        while True:
            frames = self.draw.choice(self._kinds)()
            if not _ends_the_pool(frames[0]):
                return frames

    def noise(self) -> Frames:
        """Random bytes in some frames."""
        return [self.draw.randbytes(self.draw.choice([0, 1, 2, 5, 30, 300])) for _ in range(self.draw.randint(1, 4))]

    def tiny(self) -> Frames:
        """One byte, or none."""
        return [self.draw.randbytes(self.draw.randint(0, 1))]

    def valid(self) -> Frames:
        """One of the corpus as it is."""
        return list(self.draw.choice(self._corpus))

    def flipped(self) -> Frames:
        """Some bits of the header flipped."""
        header, *payloads = self.valid()
        changed = bytearray(header)
        for _ in range(self.draw.randint(1, 4)):
            changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
        return [bytes(changed), *payloads]

    def cut(self) -> Frames:
        """Truncated somewhere, in the header or in a payload."""
        frames = self.valid()
        index = self.draw.randrange(len(frames))
        frames[index] = frames[index][: self.draw.randrange(len(frames[index]) + 1)]
        return frames

    def reshaped(self) -> Frames:
        """Frames left out, doubled, swapped, or something before, between or behind them."""
        frames = self.valid()
        match self.draw.randrange(4):
            case 0:
                frames.pop()
            case 1:
                frames.append(self.draw.choice(frames))
            case 2:
                frames.reverse()
            case 3:
                frames.insert(self.draw.randint(0, len(frames)), self.draw.randbytes(self.draw.randint(0, 20)))
        return frames or [b""]

    def wrong(self) -> Frames:
        """A value of another kind in place of one of the fields, or more fields than there are."""
        return self._with_value(self.draw.choice(WRONG))

    def numbers(self) -> Frames:
        """An extreme number in place of any number."""
        header, *payloads = self.valid()
        fields = msgspec.msgpack.decode(header)
        places = list(_number_places(fields))
        if places:
            holder, index = self.draw.choice(places)
            holder[index] = self.draw.choice(NUMBERS)
        return [msgspec.msgpack.encode(fields), *payloads]

    def bomb(self) -> Frames:
        """Nested thousands deep, as the whole header or as a field too many."""
        depth = self.draw.choice([100, 1500, 20_000])
        nest = self.draw.choice([b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"]) * depth
        return self._with_tail(nest)

    def lie(self) -> Frames:
        """A length that would need gigabytes."""
        return self._with_tail(self.draw.choice(LIES))

    def _with_tail(self, tail: bytes) -> Frames:
        header, *payloads = self.valid()
        if self.draw.random() < 0.3:
            return [tail, *payloads]
        fields = msgspec.msgpack.decode(header)
        if self.draw.random() < 0.5 and len(fields) > 1:
            fields.pop()
        encoded = b"".join(msgspec.msgpack.encode(field) for field in fields)
        return [bytes([0x90 + len(fields) + 1]) + encoded + tail, *payloads]

    def _with_value(self, value: Any) -> Frames:
        header, *payloads = self.valid()
        fields = msgspec.msgpack.decode(header)
        index = self.draw.randint(0, len(fields))
        fields[index : index + 1] = [value]
        return [msgspec.msgpack.encode(fields), *payloads]


def _ends_the_pool(header: bytes) -> bool:
    try:
        return isinstance(decode_from_client(header), Drain | Stop)
    except (msgspec.DecodeError, RecursionError):
        return False


def _number_places(value: Any) -> Any:
    """(container, index) of every number in decoded fields."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for index, item in list(items):
        if isinstance(item, int | float):
            yield value, index
        else:
            yield from _number_places(item)


def _client_messages(secret: bytes) -> list[Frames]:
    several = [SubmitItem(seq, seq % 3 - 1, None if seq % 2 else 0.5, 1) for seq in range(4)]
    headers: list[Message] = [
        *(Hello(PROTOCOL_VERSION, secret, b"another client", 1), Hello(PROTOCOL_VERSION, b"wrong", b"client", None)),
        *(Hello(PROTOCOL_VERSION + 1, secret, b"newer", None), Abort([0, 1, 2]), Abort([]), GetStatus(7), Ping(7), Bye()),
    ]
    submits = [[encode(Submit(several)), *[REQUEST] * 4], [encode(Submit([SubmitItem(9, 0, 60.0, 4)])), REQUEST], [encode(Submit([]))]]
    return [*([encode(header)] for header in headers), *submits]


def _worker_messages(secret: bytes) -> list[Frames]:
    headers: list[Message] = [
        *(Enroll(PROTOCOL_VERSION, "pool", secret, 0, 1), Enroll(PROTOCOL_VERSION, "pool", b"wrong", 0, 1), Stage("loading")),
        *(StartFailed("engine", "no"), Ready("m", 1, 1, 1, ["generate"], {"a": 1}, {"0": 1}), Window(1000, 1000), Goodbye("no")),
        *(Heartbeat(Load(1, 2, 3, 4, 0.5)), Done([]), Delta([])),
    ]
    return [*([encode(header)] for header in headers), [encode(Done([DoneItem(1), DoneItem(2)])), b"", b""], [encode(Delta([1])), b"x"]]

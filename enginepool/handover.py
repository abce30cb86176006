"""What a parent hands to a child process by file descriptor, so that secrets and arguments never stand in argv."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import msgspec

from enginepool.chat_format import RequestFormat

T = TypeVar("T")


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine to build and with what; `name` is what the model is called, `flags` are vLLM's own, for vLLM's parser."""

    kind: str
    model: str
    name: str
    args: dict[str, Any] = {}
    flags: list[str] = []
    engine_core: str = "inproc"
    kv_cache_bytes: int | None = None
    request_format: RequestFormat = RequestFormat()


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know when it starts."""

    index: int
    endpoint: str
    pool_id: str
    secret: bytes
    engine: EngineSpec
    is_static: bool
    heartbeat_s: float
    max_frame_bytes: int
    stall_timeout_s: float


def put(value: msgspec.Struct) -> int:
    """Write `value` into an anonymous file and return its descriptor (an anonymous file never blocks, a pipe may)."""
    fd = os.memfd_create("enginepool-handover")
    data = msgspec.msgpack.encode(value)
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def take(fd: int, kind: type[T]) -> T:
    """Read a value that a parent has `put`, and close the descriptor."""
    with os.fdopen(fd, "rb") as file:
        return msgspec.msgpack.decode(file.read(), type=kind)

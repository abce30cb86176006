"""OpenAI requests as items: their body travels as it is, and the worker parses it."""

from __future__ import annotations

import msgspec

from enginepool.client.requests import Encoded, EncodedParams, check_size
from enginepool.errors import ItemError
from enginepool.payload import OpenAIRequest, encode


def sequences_only(count: int) -> EncodedParams:
    """What stands in the place of params: the body has them, and only how many sequences it asks for matters on the way."""
    return EncodedParams(msgspec.Raw(b"\xc0"), count, is_default_length=False)


def encode_openai(request: OpenAIRequest, params: EncodedParams, max_frame_bytes: int) -> Encoded | ItemError:
    """Encode one request, or say that it is too large."""
    frame = encode(request)
    return check_size(frame, max_frame_bytes) or Encoded(frame, None, None, params)

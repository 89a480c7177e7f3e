"""How an engine's answer travels between two processes: frames, each a length and a msgpack body.

An empty frame says only that the engine lives. Silence means that it does not.
"""

from __future__ import annotations

import msgspec

from rillflow.errors import ErrorBody
from rillflow.types import Chunk, GenerateRequest, Wire

KEEP_ALIVE_SECONDS = 1.0
LENGTH = 4  # bytes, little-endian
LONGEST = 64 << 20
KEEP_ALIVE = bytes(LENGTH)


class Generate(Wire, frozen=True):
    """A request for one policy. No token is to be of a version below `floor`, as far as that one comes in time."""

    policy: str
    request: GenerateRequest
    floor: int = -1


class Hold(Wire, frozen=True):
    """Stop sampling for `reason`, for so many seconds at most. `move`: running answers are to go on elsewhere."""

    reason: str
    move: bool = False
    seconds: float = 10.0


class Release(Wire, frozen=True):
    reason: str


class Frame(Wire, frozen=True):
    """Exactly one of the two."""

    chunk: Chunk | None = None
    error: ErrorBody | None = None


_encoder = msgspec.msgpack.Encoder()
decode = msgspec.msgpack.Decoder(Frame).decode


def encode(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return len(body).to_bytes(LENGTH, "little") + body

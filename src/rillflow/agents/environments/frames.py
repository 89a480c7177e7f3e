"""How we talk with an environment's process: a length, then that much msgpack, over a pipe. One answer a question."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any

import msgspec

_HEAD = struct.Struct(">I")
LARGEST = 16 << 20


def write_frame(pipe: int, message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes is too long")
    left = memoryview(_HEAD.pack(len(body)) + body)
    while left:
        left = left[os.write(pipe, left) :]


def read_frame(pipe: int, seconds: float | None) -> Any:
    """The next message. EOFError when the other end has gone, TimeoutError when none is whole in time."""
    end = None if seconds is None else time.monotonic() + seconds
    (length,) = _HEAD.unpack(_read(pipe, _HEAD.size, end))
    if length > LARGEST:
        raise EOFError(f"a message of {length} bytes was announced")
    return msgspec.msgpack.decode(_read(pipe, length, end))


def _read(pipe: int, count: int, end: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        left = None if end is None else end - time.monotonic()
        if left is not None and (left <= 0 or not select.select([pipe], [], [], left)[0]):
            raise TimeoutError
        part = os.read(pipe, min(count - len(parts), 1 << 16))
        if not part:
            raise EOFError("the pipe was closed")
        parts += part
    return bytes(parts)

"""Frames on a stream socket: a length, then that many bytes. The end of the stream is an EOFError.

Only the standard library is imported here: this file also runs inside the sandbox.
"""

from __future__ import annotations

import socket
import struct
import time

HEAD = struct.Struct("<I")
LIMIT = 64 << 20
_PIECE = 1 << 20


def send(channel: socket.socket, body: bytes) -> None:
    """Write one frame."""
    channel.sendall(HEAD.pack(len(body)) + body)


def receive(channel: socket.socket, limit: int = LIMIT, deadline: float | None = None) -> bytes:
    """Return the next frame, or raise TimeoutError if it is not complete at `deadline` (of `time.monotonic`)."""
    (length,) = HEAD.unpack(_exactly(channel, HEAD.size, deadline))
    if length > limit:
        raise EOFError(f"a frame of {length} bytes is longer than {limit}")
    return _exactly(channel, length, deadline)


def _exactly(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = []
    while count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        part = channel.recv(min(count, _PIECE))
        if not part:
            raise EOFError("the stream has ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

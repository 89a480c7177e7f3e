"""Frames on a stream socket: a length, then that many bytes. The end of the stream is EOFError."""

from __future__ import annotations

import socket
import struct

HEAD = struct.Struct("<I")
LIMIT = 64 << 20


def send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(HEAD.pack(len(body)) + body)


def receive(channel: socket.socket, limit: int = LIMIT) -> bytes:
    (length,) = HEAD.unpack(_exactly(channel, HEAD.size))
    if length > limit:
        raise EOFError(f"a frame of {length} bytes")
    return _exactly(channel, length)


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = channel.recv(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

"""Plain values as bytes, and frames on a stream socket, for the line between a candidate's process and its tests.

Decoding makes only the plain types below and `Ref`s (numbers of objects that stay in their process). It never calls
code that the bytes name, and its depth is bounded. So a value cannot bring its own method (an `__eq__` that is always
true) to the other side. Instances of subclasses become instances of the plain type.

A frame is a length, then that many bytes. The end of the stream is an EOFError. Only the standard library is imported
here: this file also runs inside the sandbox.
"""

from __future__ import annotations

import builtins
import socket
import struct
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

DEPTH = 100
ITEMS = 1 << 20  # most items of an iterator; more would be too long for an answer
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


class NotPlain(Exception):
    """The value cannot be sent, or the bytes are malformed."""


class Ref:
    """The number of an object that cannot be sent and stays in the candidate's process."""

    __slots__ = ("_rillflow_number",)  # a name that no object has

    def __init__(self, number: int) -> None:
        self._rillflow_number = number


def pack(value: Any, keep: Callable[[Any], int] | None = None) -> bytes:
    """Return the bytes of a value; an object that is not plain is kept by `keep` and sent as its number."""
    parts: list[bytes] = []
    _write(parts, value, keep, 0)
    return b"".join(parts)


def unpack(data: bytes, ref: Callable[[int], Any] = Ref, depth: int = 0) -> Any:
    """Return the value of the bytes; its nesting is counted from `depth`."""
    try:
        value, end = _read(data, 0, ref, depth)
    except (struct.error, ValueError, UnicodeError, TypeError, OverflowError) as error:
        raise NotPlain(f"malformed bytes: {error}") from None
    if end != len(data):
        raise NotPlain("malformed bytes: something follows the value")
    return value


def _chunk(tag: bytes, body: bytes) -> bytes:
    return tag + _LENGTH.pack(len(body)) + body


def _write(parts: list[bytes], value: Any, keep: Callable[[Any], int] | None, depth: int) -> None:
    if depth > DEPTH:
        raise NotPlain(f"a value is nested more than {DEPTH} deep")
    atom = _atom(value)
    if atom is not None:
        parts.append(atom)
    elif isinstance(value, range):
        _write_items(parts, b"r", (value.start, value.stop, value.step), keep, depth)
    elif isinstance(value, dict):
        pairs = [part for pair in dict.items(value) for part in pair]
        _write_items(parts, b"d", pairs, keep, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        _write_items(parts, _tag(value), value, keep, depth)
    elif isinstance(value, Ref):
        parts += (b"o", _LENGTH.pack(value._rillflow_number))
    elif hasattr(value, "__next__"):
        _write_items(parts, b"g", _left_of(value), keep, depth)
    elif keep is None:
        raise NotPlain(f"a {type(value).__name__} cannot be sent")
    else:
        parts += (b"o", _LENGTH.pack(keep(value)))


def _atom(value: Any) -> bytes | None:
    """Return the bytes of a value that holds no others, or None."""
    if value is None or value is True or value is False:
        return {None: b"N", True: b"T", False: b"F"}[value]
    for kind, write in _ATOMS.items():
        if isinstance(value, kind):
            return write(value)
    return None


def _write_type(kind: type) -> bytes | None:
    name = kind.__name__
    return _chunk(b"y", name.encode()) if vars(builtins).get(name) is kind else None


def _tag(value: Any) -> bytes:
    for tag, kind in ((b"l", list), (b"t", tuple), (b"S", set), (b"z", frozenset)):
        if isinstance(value, kind):
            return tag
    raise NotPlain("not a container")


def _left_of(iterator: Iterator[Any]) -> list[Any]:
    """Return the remaining items of an iterator; it becomes an iterator again on the other side."""
    items = list(islice(iterator, ITEMS + 1))
    if len(items) > ITEMS:
        raise NotPlain(f"an iterator gives more than {ITEMS} items")
    return items


def _write_items(parts: list[bytes], tag: bytes, items: Any, keep: Callable[[Any], int] | None, depth: int) -> None:
    held = list(items)
    parts += (tag, _LENGTH.pack(len(held)))
    for item in held:
        _write(parts, item, keep, depth + 1)


def _read(data: bytes, at: int, ref: Callable[[int], Any], depth: int) -> tuple[Any, int]:
    if depth > DEPTH:
        raise NotPlain(f"a value is nested more than {DEPTH} deep")
    tag = data[at : at + 1]
    at += 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag == b"f":
        return _FLOAT.unpack_from(data, at)[0], at + _FLOAT.size
    if tag == b"c":
        return complex(*_COMPLEX.unpack_from(data, at)), at + _COMPLEX.size
    (length,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    if tag == b"o":
        return ref(length), at
    if tag in _TEXTS:
        if at + length > len(data):
            raise NotPlain("malformed bytes: cut off")
        return _TEXTS[tag](data[at : at + length]), at + length
    if tag not in _CONTAINERS:
        raise NotPlain("malformed bytes: unknown tag")
    items = []
    for _ in range(length):  # a wrong length fails at the end of the data
        item, at = _read(data, at, ref, depth + 1)
        items.append(item)
    return _CONTAINERS[tag](items), at


def _builtin_type(name: bytes) -> type:
    found = vars(builtins).get(name.decode("ascii"))
    if not isinstance(found, type):
        raise NotPlain("malformed bytes: no such type")
    return found


_ATOMS: dict[type, Callable[[Any], bytes | None]] = {
    int: lambda value: _chunk(b"i", b"%x" % int(value)),
    float: lambda value: b"f" + _FLOAT.pack(value),
    complex: lambda value: b"c" + _COMPLEX.pack(value.real, value.imag),
    str: lambda value: _chunk(b"s", str.encode(value, "utf-8", "surrogatepass")),
    bytes: lambda value: _chunk(b"b", bytes(value)),
    bytearray: lambda value: _chunk(b"B", bytes(value)),
    type: _write_type,
}
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_TEXTS: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda body: int(body, 16),
    b"s": lambda body: body.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"B": bytearray,
    b"y": _builtin_type,
}
_CONTAINERS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"S": set,
    b"z": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    b"r": lambda items: range(*items),
    b"g": iter,
}


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

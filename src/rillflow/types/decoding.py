"""msgspec decoders, each built once for its type.

msgspec 0.22 describes a struct to itself when it is decoded for the first time, and crashes the interpreter when two
threads do so at once. Here a decoder is built under a lock, and every later call finds it.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_LOCK = Lock()
_JSON: dict[Any, msgspec.json.Decoder[Any]] = {}
_MSGPACK: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    found = _JSON.get(kind)
    if found is None:
        with _LOCK:
            found = _JSON.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    found = _MSGPACK.get(kind)
    if found is None:
        with _LOCK:
            found = _MSGPACK.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return found

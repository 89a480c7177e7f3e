"""The base of all wire structs, the types that they share, and msgspec decoders, each built once for its type.

msgspec 0.22 describes a struct to itself when it is decoded for the first time, and crashes the interpreter when two
threads do so at once. Here a decoder is built under a lock, and every later call finds it.
"""

from __future__ import annotations

import sys
import uuid
from threading import Lock
from typing import Annotated, Any, Literal, TypeVar

import msgspec

# A number in a body that changes state: NaN and infinity are refused while decoding.
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

Lane = Literal["train", "eval"]
Phase = Literal["training", "finishing", "ended"]
TokenScope = Literal["operator", "trainer", "stage", "unit", "node", "reader"]  # of a token (`wire.tokens`)

# The reasons of a run that ended successfully.
DONE, OUT_OF_PROMPTS, TARGET_REACHED = "done", "out of prompts", "target reached"
GOOD_ENDS = (DONE, OUT_OF_PROMPTS, TARGET_REACHED)


def new_attempt() -> str:
    """Return a new attempt id: the receiver takes each id once, so a call that is retried keeps its own."""
    return uuid.uuid4().hex


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that travels: keyword-only, immutable, unknown fields refused.

    No struct can be part of a cycle, because it is made after everything that it holds. So the garbage collector need
    not track them: a batch has thousands.
    """


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

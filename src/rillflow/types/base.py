"""The base of all wire structs, and the types that they share."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated, Literal

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

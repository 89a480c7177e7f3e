"""What all that travels is made of."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated, Literal

import msgspec

# A number in a body that changes something: NaN and infinity are refused before anything sees them.
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

Lane = Literal["train", "eval"]
Phase = Literal["training", "finishing", "ended"]
TokenScope = Literal["operator", "trainer", "stage", "unit", "node", "reader"]  # of a token (`wire.tokens`)

# Why a run has ended, where it did what it was asked for.
DONE, OUT_OF_PROMPTS, TARGET_REACHED = "done", "out of prompts", "target reached"
GOOD_ENDS = (DONE, OUT_OF_PROMPTS, TARGET_REACHED)


def new_attempt() -> str:
    """Return a new attempt id: the receiver takes each id once, so a call that is retried keeps its own."""
    return uuid.uuid4().hex


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that travels: keyword-only, immutable, unknown fields refused.

    None can be part of a cycle, since each is made after all that it holds; so the collector need not look at them:
    a batch has thousands.
    """

"""The reward of `bench.moe_gpu`: random weights get different rewards within a group, so every step has a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """Return the share of lower-case letters in the answer."""
    text = answer or ""
    return sum(letter.islower() for letter in text) / max(1, len(text))

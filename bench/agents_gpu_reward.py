"""The reward of sums where reasoning-gym is not installed: what its own scorer says of the last number, all or nothing.

A test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from rillflow.agents.rewards.base import last_number, text_of


def reward(payload: Mapping[str, Any], answer: Any) -> float:
    """1.0 if the last number of the answer is the prompt's, else 0.0."""
    said = last_number(text_of(answer))
    try:
        return float(said is not None and Decimal(said) == Decimal(payload["answer"]))
    except InvalidOperation:
        return 0.0

"""One-digit addition: the smallest task on which a pretrained model of any size can be seen to learn.

The splits ask for different pairs of digits; every sum but a few occurs in both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

QUESTION = "What is {a} + {b}? Give only the number."
SPLITS = ("train", "heldout")
_NUMBER = re.compile(r"-?\d+")


def pairs(split: str) -> list[tuple[int, int]]:
    """The pairs of digits that `split` may ask for: a quarter of all is held out, alike in every row and column."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    return [(a, b) for a in range(10) for b in range(10) if ((a + 3 * b) % 4 == 0) == (split == "heldout")]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`; the same arguments always give the same prompts."""
    choices, generator = pairs(split), random.Random(f"addition/{split}/{seed}")
    for index in range(count):
        a, b = generator.choice(choices)
        payload = {"question": QUESTION.format(a=a, b=b), "sum": a + b}
        yield {"id": f"addition-{split}-{seed}-{index}", "payload": payload}


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """1.0 if the last number of the answer is the sum, else 0.0."""
    numbers = _NUMBER.findall(answer or "")
    return float(bool(numbers) and numbers[-1].lstrip("0") == str(payload["sum"]).lstrip("0"))

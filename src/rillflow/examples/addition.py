"""One-digit addition: the smallest task on which a pretrained model of any size can learn.

The splits ask for different pairs of digits. Almost every sum occurs in both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments.splits import check_split

QUESTION = "What is {a} + {b}? Give only the number."
_NUMBER = re.compile(r"-?\d+")


def pairs(split: str) -> list[tuple[int, int]]:
    """Return the pairs of digits of `split`; a quarter of each row and column is held out."""
    check_split(split)
    return [(a, b) for a in range(10) for b in range(10) if ((a + 3 * b) % 4 == 0) == (split == "heldout")]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`."""
    choices, generator = pairs(split), random.Random(f"addition/{split}/{seed}")
    for index in range(count):
        a, b = generator.choice(choices)
        payload = {"question": QUESTION.format(a=a, b=b), "sum": a + b}
        yield {"id": f"addition-{split}-{seed}-{index}", "payload": payload}


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """Return 1.0 if the last number of the answer is the sum, else 0.0."""
    numbers = _NUMBER.findall(answer or "")
    return float(bool(numbers) and numbers[-1].lstrip("0") == str(payload["sum"]).lstrip("0"))

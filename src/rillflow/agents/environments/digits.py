"""The largest of some digits: a question without tools that a tiny policy half knows after a short lesson.

The splits ask for different sets of digits, while every digit is the answer in both: what is learned has to be the
comparison, not a table.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

QUESTION = "What is the largest of {digits}?"
SPLITS = ("train", "heldout")
_NUMBER = re.compile(r"-?[0-9]+")


def sets(split: str, size: int) -> list[tuple[int, ...]]:
    """The sets of `size` digits that `split` may ask for; a quarter of all is held out."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    return [
        digits for digits in itertools.combinations(range(10), size) if (sum(digits) % 4 == 0) == (split == "heldout")
    ]


def prompts(split: str, count: int, seed: int, size: int = 5) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`; the same arguments always give the same prompts."""
    choices, generator = sets(split, size), random.Random(f"digits/{split}/{seed}/{size}")
    for index in range(count):
        digits = list(generator.choice(choices))
        generator.shuffle(digits)
        payload = {"question": question(digits), "answer": str(max(digits)), "digits": digits}
        yield {"id": f"digits-{split}-{seed}-{index}", "payload": payload}


def question(digits: Sequence[int]) -> str:
    return QUESTION.format(digits="".join(map(str, digits)))


def reward(payload: Mapping[str, Any], answer: str | None) -> float:
    """1.0 if the last number of the answer is the digit that was asked for, else 0.0."""
    numbers = _NUMBER.findall(answer or "")
    return float(bool(numbers) and numbers[-1] == payload["answer"])

"""Programs of one line: a function of x that does two sums, one after the other; a tiny policy can write them.

The splits ask for different pairs of numbers, while every number and every operation occurs in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

OPERATIONS = {"add": "+", "take": "-", "times": "*"}
NUMBERS = range(2, 10)
SPLITS = ("train", "heldout")
QUESTION = "f(x): {first} {a}, then {second} {b}"
_INPUTS = (0, 1, 5, 12)


def pairs(split: str) -> list[tuple[int, int]]:
    """The pairs of numbers that `split` may ask for: a quarter of all is held out."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    return [(a, b) for a in NUMBERS for b in NUMBERS if ((a + b) % 4 == 0) == (split == "heldout")]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`, with hidden tests and a reference solution in the shape of MBPP."""
    choices, generator = pairs(split), random.Random(f"formulas/{split}/{seed}")
    for index in range(count):
        a, b = generator.choice(choices)
        first, second = generator.choices(list(OPERATIONS), k=2)
        payload = {
            "question": QUESTION.format(first=first, a=a, second=second, b=b),
            "steps": [[first, a], [second, b]],
            "code": program(first, a, second, b),
            "test_list": [f"assert f({x}) == {result(x, first, a, second, b)}" for x in _INPUTS],
        }
        yield {"id": f"formulas-{split}-{seed}-{index}", "payload": payload}


def program(first: str, a: int, second: str, b: int) -> str:
    return f"def f(x): return (x {OPERATIONS[first]} {a}) {OPERATIONS[second]} {b}"


def result(x: int, first: str, a: int, second: str, b: int) -> int:
    return _applied(second, _applied(first, x, a), b)


def _applied(operation: str, x: int, y: int) -> int:
    return x + y if operation == "add" else x - y if operation == "take" else x * y

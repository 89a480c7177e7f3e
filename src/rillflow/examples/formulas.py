"""One-line programs: a function of x with two arithmetic operations, short enough for a tiny policy to write.

The splits ask for different pairs of numbers; every number and every operation occurs in both. The templates SELECT,
TEST and RETRY are those of `recipes/solver_selector.yaml` and `recipes/solver_tester.yaml`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments.splits import check_split, held_out

OPERATIONS = {"add": "+", "take": "-", "times": "*"}
NUMBERS = range(2, 10)
QUESTION = "f(x): {first} {a}, then {second} {b}"
SELECT = "{question} A: {a} B: {b}"
TEST = "{question} Is {program} right?"
RETRY = "{question} {program} {results}"
_TESTED_INPUTS = (0, 1, 5, 12)
_WRITTEN_INPUTS = range(4)  # small numbers, because a tiny policy has to compute the result itself

Payload = Mapping[str, Any]


def pairs(split: str) -> list[tuple[int, int]]:
    """Return the pairs of numbers of `split`; a quarter of all is held out."""
    check_split(split)
    return [(a, b) for a in NUMBERS for b in NUMBERS if held_out(a, b) == (split == "heldout")]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`, with hidden tests and a reference solution in the format of MBPP."""
    choices, generator = pairs(split), random.Random(f"formulas/{split}/{seed}")
    for index in range(count):
        a, b = generator.choice(choices)
        first, second = generator.choices(list(OPERATIONS), k=2)
        payload = {
            "question": QUESTION.format(first=first, a=a, second=second, b=b),
            "steps": [[first, a], [second, b]],
            "code": program(first, a, second, b),
            "test_list": [f"assert f({x}) == {result(x, first, a, second, b)}" for x in _TESTED_INPUTS],
        }
        yield {"id": f"formulas-{split}-{seed}-{index}", "payload": payload}


def program(first: str, a: int, second: str, b: int) -> str:
    """Return the source of the function."""
    return f"def f(x): return (x {OPERATIONS[first]} {a}) {OPERATIONS[second]} {b}"


def result(x: int, first: str, a: int, second: str, b: int) -> int:
    """Return the function's value for `x`."""
    return _applied(second, _applied(first, x, a), b)


def _applied(operation: str, x: int, y: int) -> int:
    return x + y if operation == "add" else x - y if operation == "take" else x * y


# Demonstrations


def lessons(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` rows for sft: programs, choices between two, test cases and retries in turn."""
    generator = random.Random(f"formulas_lessons/{split}/{seed}")
    kinds = (_solution, _choice, _cases, _retry)
    for index, prompt in enumerate(prompts(split, count, seed)):
        asked, answer = kinds[index % len(kinds)](prompt["payload"], generator)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def _solution(payload: Payload, generator: random.Random) -> tuple[str, str]:
    return payload["question"], payload["code"]


def _choice(payload: Payload, generator: random.Random) -> tuple[str, str]:
    right, wrong = payload["code"], _wrong_program(payload, generator)
    first = generator.random() < 1 / 2
    a, b = (right, wrong) if first else (wrong, right)
    return SELECT.format(question=payload["question"], a=a, b=b), f"<final>{'A' if first else 'B'}</final>"


def _cases(payload: Payload, generator: random.Random) -> tuple[str, str]:
    shown = payload["code"] if generator.random() < 1 / 2 else _wrong_program(payload, generator)
    rows = [{"input": f"f({x})", "output": str(_value(payload, x))} for x in generator.sample(_WRITTEN_INPUTS, 2)]
    return TEST.format(question=payload["question"], program=shown), json.dumps(rows)


def _retry(payload: Payload, generator: random.Random) -> tuple[str, str]:
    inputs = generator.sample(_WRITTEN_INPUTS, 2)
    results = "\n".join(f"f({x}) should give {_value(payload, x)}: failed" for x in inputs)
    wrong = _wrong_program(payload, generator)
    return RETRY.format(question=payload["question"], program=wrong, results=results), payload["code"]


def _wrong_program(payload: Payload, generator: random.Random) -> str:
    """Return the program with one operation or one number replaced."""
    steps = [list(step) for step in payload["steps"]]
    step, part = generator.randrange(2), generator.randrange(2)
    others = list(NUMBERS) if part else list(OPERATIONS)
    steps[step][part] = generator.choice([other for other in others if other != steps[step][part]])
    (first, a), (second, b) = steps
    return program(first, a, second, b)


def _value(payload: Payload, x: int) -> int:
    (first, a), (second, b) = payload["steps"]
    return result(x, first, a, second, b)

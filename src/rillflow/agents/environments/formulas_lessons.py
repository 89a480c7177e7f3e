"""Lessons of the formulas for a solver, a selector and a tester, so that a tiny policy knows how the parts are played.

The words around programs are those of `recipes/solver_selector.yaml` and `recipes/solver_tester.yaml`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments import formulas

SELECT = "{question} A: {a} B: {b}"
TEST = "{question} Is {program} right?"
RETRY = "{question} {program} {results}"
_INPUTS = range(4)  # small ones: a tiny policy has to do the sum


def lessons(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of sft: a program, a choice between two, two cases and a second try, one after the other; `count` of them."""
    generator = random.Random(f"formulas_lessons/{split}/{seed}")
    parts = (solution, choice, cases, retry)
    for index, prompt in enumerate(formulas.prompts(split, count, seed)):
        asked, said = parts[index % len(parts)](prompt["payload"], generator)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def solution(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    return payload["question"], payload["code"]


def choice(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    right, wrong = payload["code"], mistaken(payload, generator)
    first = generator.random() < 1 / 2
    a, b = (right, wrong) if first else (wrong, right)
    return SELECT.format(question=payload["question"], a=a, b=b), f"<final>{'A' if first else 'B'}</final>"


def cases(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    shown = payload["code"] if generator.random() < 1 / 2 else mistaken(payload, generator)
    rows = [{"input": f"f({x})", "output": str(_right(payload, x))} for x in generator.sample(_INPUTS, 2)]
    return TEST.format(question=payload["question"], program=shown), json.dumps(rows)


def retry(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    x, y = generator.sample(_INPUTS, 2)
    results = "\n".join(f"f({at}) should give {_right(payload, at)}: failed" for at in (x, y))
    asked = RETRY.format(question=payload["question"], program=mistaken(payload, generator), results=results)
    return asked, payload["code"]


def mistaken(payload: Mapping[str, Any], generator: random.Random) -> str:
    """A program with another number or another operation in one of its two places."""
    steps = [list(step) for step in payload["steps"]]
    place, part = generator.randrange(2), generator.randrange(2)
    others = list(formulas.NUMBERS) if part else list(formulas.OPERATIONS)
    steps[place][part] = generator.choice([other for other in others if other != steps[place][part]])
    (first, a), (second, b) = steps
    return formulas.program(first, a, second, b)


def _right(payload: Mapping[str, Any], x: int) -> int:
    (first, a), (second, b) = payload["steps"]
    return formulas.result(x, first, a, second, b)

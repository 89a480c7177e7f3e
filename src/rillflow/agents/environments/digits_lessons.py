"""Lessons of the digits for a solver and a verifier, so that a tiny policy knows how both parts are played.

The words around questions and answers are those of `recipes/solver_verifier.yaml`. The teacher is right only so often
as `right` says, and takes another of the digits otherwise: the form is learned well, the matter is left to learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments import digits

VERIFY = "{question} {solution}. Is it right?"
RETRY = "{question} {verdict}"
_SHOWN_RIGHT = 0.5  # share of the solutions that a verifier is shown


def lessons(split: str, count: int, seed: int, right: float = 0.6) -> Iterator[dict[str, Any]]:
    """Of sft: a solution, a verdict and a second try, one after the other; `count` of them."""
    generator = random.Random(f"digits_lessons/{split}/{seed}")
    parts = (solution, verdict, retry)
    for index, prompt in enumerate(digits.prompts(split, count, seed)):
        asked, said = parts[index % len(parts)](prompt["payload"], generator, right)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def solution(payload: Mapping[str, Any], generator: random.Random, right: float) -> tuple[str, str]:
    return payload["question"], _digit(payload, generator, right)


def verdict(payload: Mapping[str, Any], generator: random.Random, right: float) -> tuple[str, str]:
    """The verifier works it out itself, then compares."""
    shown, found = _digit(payload, generator, _SHOWN_RIGHT), _digit(payload, generator, right)
    asked = VERIFY.format(question=payload["question"], solution=shown)
    return asked, verdict_text(found, approves=shown == found)


def retry(payload: Mapping[str, Any], generator: random.Random, right: float) -> tuple[str, str]:
    """What the verifier got may be wrong as well: a second try does not just repeat it."""
    rejected = verdict_text(_digit(payload, generator, right), approves=False)
    return RETRY.format(question=payload["question"], verdict=rejected), _digit(payload, generator, right)


def verdict_text(found: str, *, approves: bool) -> str:
    return f"I get {found}. <verify>{'approve' if approves else 'reject'}</verify>"


def _digit(payload: Mapping[str, Any], generator: random.Random, right: float) -> str:
    """The right one so often, else another of those that were given."""
    if generator.random() < right:
        return str(payload["answer"])
    return str(generator.choice([digit for digit in payload["digits"] if str(digit) != payload["answer"]]))

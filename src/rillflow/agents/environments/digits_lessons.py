"""Lessons of the digits for a solver and a verifier, so that a tiny policy knows how both parts are played.

The words around questions and answers are those of `recipes/solver_verifier.yaml`. What the lessons teach is the form;
how good the player becomes depends on how many it sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments import digits

VERIFY = "{question} {solution}. Is it right?"
RETRY = "{question} {verdict}"
_SHARE_RIGHT = 0.5  # of the solutions that a verifier is shown, and of the digits that it gets itself in a retry


def lessons(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of sft: a solution, a verdict and a second try, one after the other; `count` of them."""
    generator = random.Random(f"digits_lessons/{split}/{seed}")
    parts = (solution, verdict, retry)
    for index, prompt in enumerate(digits.prompts(split, count, seed)):
        asked, said = parts[index % len(parts)](prompt["payload"], generator)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def solution(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    return payload["question"], payload["answer"]


def verdict(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    """The verifier works it out itself, then compares."""
    shown = _digit(payload, generator)
    asked = VERIFY.format(question=payload["question"], solution=shown)
    return asked, verdict_text(payload["answer"], approves=shown == payload["answer"])


def retry(payload: Mapping[str, Any], generator: random.Random) -> tuple[str, str]:
    """What the verifier got may be wrong as well: a second try does not just repeat it."""
    rejected = verdict_text(_digit(payload, generator), approves=False)
    return RETRY.format(question=payload["question"], verdict=rejected), payload["answer"]


def verdict_text(found: str, *, approves: bool) -> str:
    return f"I get {found}. <verify>{'approve' if approves else 'reject'}</verify>"


def _digit(payload: Mapping[str, Any], generator: random.Random) -> str:
    """The right one, or another of those that were given."""
    if generator.random() < _SHARE_RIGHT:
        return str(payload["answer"])
    return str(generator.choice([digit for digit in payload["digits"] if str(digit) != payload["answer"]]))

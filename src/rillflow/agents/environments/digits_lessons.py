"""Lessons of the digits for a solver and a verifier, and for agents that share the work.

The words around questions and answers are those of `recipes/solver_verifier.yaml` and `recipes/recursive.yaml`. The
teacher is right only so often as `right` says, and takes another of the digits otherwise: the form is learned well,
the matter is left to learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments import digits

VERIFY = "{question} {solution}. Is it right?"
RETRY = "{question} {verdict}"
TOGETHER = 6  # digits of a question that is shared
_SHOWN_RIGHT = 0.5  # share of the solutions that a verifier is shown


def lessons(split: str, count: int, seed: int, right: float = 0.7) -> Iterator[dict[str, Any]]:
    """Of sft: a solution, a verdict and a second try, one after the other; `count` of them."""
    generator = random.Random(f"digits_lessons/{split}/{seed}")
    parts = (solution, verdict, retry)
    for index, prompt in enumerate(digits.prompts(split, count, seed)):
        asked, said = parts[index % len(parts)](prompt["payload"], generator, right)
        yield {"id": prompt["id"], "payload": {"messages": _talk(asked, said)}}


def delegations(split: str, count: int, seed: int, right: float = 0.7) -> Iterator[dict[str, Any]]:
    """Of sft: agents ask two others about half of the digits each, which look at theirs; `count` of both together."""
    generator = random.Random(f"digits_delegations/{split}/{seed}")
    for index, prompt in enumerate(digits.prompts(split, count, seed, size=TOGETHER)):
        given = prompt["payload"]["digits"]
        halves = [given[: len(given) // 2], given[len(given) // 2 :]]
        messages = _shared(given, halves) if index % 2 else _alone(halves[0], generator, right)
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def _alone(given: list[int], generator: random.Random, right: float) -> list[dict[str, str]]:
    payload = {"answer": str(max(given)), "digits": given}
    return _talk(digits.question(given), f"<answer>{_digit(payload, generator, right)}</answer>")


def _shared(given: list[int], halves: list[list[int]]) -> list[dict[str, str]]:
    asks = "".join(f"<ask>{digits.question(half)}</ask>" for half in halves)
    results = "".join(f"<result>{max(half)}</result>" for half in halves)
    return _talk(digits.question(given), asks, results, f"<answer>{max(given)}</answer>")


def _talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


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

"""The largest of some digits: a question that agents can share, with demonstrations for the workflow `recursive`.

The splits ask for different sets of digits, and every digit is an answer in both. A policy has to learn to compare; it
cannot memorise the answers. Agents that answer alone give the right digit with probability `right` and another one of
the question otherwise, so a policy learns the format and reinforcement learning can still improve its answers.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rillflow.agents.environments.splits import check_split

QUESTION = "What is the largest of {digits}?"
_DELEGATED_SIZE = 6  # digits of a question whose halves are delegated
_NUMBER = re.compile(r"-?[0-9]+")

Payload = Mapping[str, Any]


def sets(split: str, size: int) -> list[tuple[int, ...]]:
    """Return the sets of `size` digits of `split`; about a quarter of all is held out."""
    check_split(split)
    return [
        digits for digits in itertools.combinations(range(10), size) if (sum(digits) % 4 == 0) == (split == "heldout")
    ]


def prompts(split: str, count: int, seed: int, size: int = 5) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`, each about `size` digits."""
    choices, generator = sets(split, size), random.Random(f"digits/{split}/{seed}/{size}")
    for index in range(count):
        digits = list(generator.choice(choices))
        generator.shuffle(digits)
        payload = {"question": question(digits), "answer": str(max(digits)), "digits": digits}
        yield {"id": f"digits-{split}-{seed}-{index}", "payload": payload}


def question(digits: Sequence[int]) -> str:
    """Return the question about these digits."""
    return QUESTION.format(digits="".join(map(str, digits)))


def reward(payload: Payload, answer: str | None) -> float:
    """Return 1.0 if the last number of the answer is the largest digit, else 0.0."""
    numbers = _NUMBER.findall(answer or "")
    return float(bool(numbers) and numbers[-1] == payload["answer"])


# Demonstrations


def delegations(split: str, count: int, seed: int, right: float = 0.7) -> Iterator[dict[str, Any]]:
    """Yield `count` rows for sft: in turn an agent that answers alone and one that delegates both halves."""
    generator = random.Random(f"digits_delegations/{split}/{seed}")
    for index, prompt in enumerate(prompts(split, count, seed, size=_DELEGATED_SIZE)):
        digits = prompt["payload"]["digits"]
        halves = [digits[: len(digits) // 2], digits[len(digits) // 2 :]]
        messages = _delegated(digits, halves) if index % 2 else _alone(halves[0], generator, right)
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def _alone(digits: list[int], generator: random.Random, right: float) -> list[dict[str, str]]:
    payload = {"answer": str(max(digits)), "digits": digits}
    return _conversation(question(digits), f"<answer>{_digit(payload, generator, right)}</answer>")


def _delegated(digits: list[int], halves: list[list[int]]) -> list[dict[str, str]]:
    asks = "".join(f"<ask>{question(half)}</ask>" for half in halves)
    results = "".join(f"<result>{max(half)}</result>" for half in halves)
    return _conversation(question(digits), asks, results, f"<answer>{max(digits)}</answer>")


def _conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]


def _digit(payload: Payload, generator: random.Random, right: float) -> str:
    """Return the answer with probability `right`, else another digit of the question."""
    if generator.random() < right:
        return str(payload["answer"])
    return str(generator.choice([digit for digit in payload["digits"] if str(digit) != payload["answer"]]))

"""Two letters whose digits make a sum: a question that is harder to solve than to check.

`a3,b8,c1,d6,e9. Which two make 10?` A solver has to search the pairs for `c+e`. A verifier reads the two digits of a
solution, adds them and compares the sum. The splits ask about different sets of digits, and every digit is in both.

The templates VERIFY and RETRY are those of `recipes/solver_verifier.yaml`. The demonstrations are right with
probability `right`, the verifier's sums with probability `checked`; so a policy learns the format, and reinforcement
learning can still improve its answers.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments.splits import check_split

LETTERS = "abcde"
QUESTION = "{digits}. Which two make {target}?"
VERIFY = "{question}\n{solution}\nIs it right?"
RETRY = "{question}\n{verdict}"
_SHOWN_RIGHT = 0.5  # share of right solutions among those shown to the verifier
_PAIR = re.compile(r"([a-e])\s*\+\s*([a-e])")
_PAIRS = tuple("+".join(pair) for pair in itertools.combinations(LETTERS, 2))

Payload = Mapping[str, Any]


def sets(split: str) -> list[tuple[int, ...]]:
    """Return the sets of digits of `split`; about a quarter of all is held out."""
    check_split(split)
    found = itertools.combinations(range(10), len(LETTERS))
    return [digits for digits in found if (sum(digits) % 4 == 0) == (split == "heldout")]


def prompts(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`; the same arguments always give the same prompts."""
    choices, generator = sets(split), random.Random(f"pairs/{split}/{seed}")
    for index in range(count):
        digits = list(generator.choice(choices))
        generator.shuffle(digits)
        of = dict(zip(LETTERS, digits, strict=True))
        target = sum(generator.sample(digits, 2))
        listed = ",".join(f"{letter}{digit}" for letter, digit in of.items())
        payload = {"question": QUESTION.format(digits=listed, target=target), "digits": of, "target": target}
        yield {"id": f"pairs-{split}-{seed}-{index}", "payload": payload}


def reward(payload: Payload, answer: str | None) -> float:
    """Return 1.0 if the answer's last pair are two letters whose digits make the sum, else 0.0."""
    named = _PAIR.findall(answer or "")
    return float(bool(named) and _is_right(payload, "+".join(named[-1])))


def _is_right(payload: Payload, pair: str) -> bool:
    one, other = pair.split("+")
    return one != other and _sum(payload, pair) == payload["target"]


def _sum(payload: Payload, pair: str) -> int:
    return sum(int(payload["digits"][letter]) for letter in pair.split("+"))


# Demonstrations


def lessons(split: str, count: int, seed: int, right: float = 0.5, checked: float = 0.9) -> Iterator[dict[str, Any]]:
    """Yield `count` rows for sft: solutions, verdicts and retries in turn."""
    generator = random.Random(f"pairs_lessons/{split}/{seed}")
    for index, prompt in enumerate(prompts(split, count, seed)):
        payload, kind = prompt["payload"], index % 3
        if kind == 0:
            asked, answer = payload["question"], _solution(payload, generator, right)
        elif kind == 1:
            shown = _solution(payload, generator, _SHOWN_RIGHT)
            asked = VERIFY.format(question=payload["question"], solution=shown)
            answer = _verdict(payload, shown, generator, checked)
        else:
            rejected = _solution(payload, generator, 0.0)
            asked = RETRY.format(question=payload["question"], verdict=_verdict(payload, rejected, generator, 1.0))
            answer = _solution(payload, generator, right, apart=rejected)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def _solution(payload: Payload, generator: random.Random, right: float, apart: str = "") -> str:
    """Return a right pair with probability `right`, else a wrong one that is not `apart`."""
    wanted = generator.random() < right
    return generator.choice([pair for pair in _PAIRS if pair != apart and _is_right(payload, pair) == wanted])


def _verdict(payload: Payload, pair: str, generator: random.Random, checked: float) -> str:
    """Return the digits of a pair, their sum and the verdict that follows; the sum is off by one unless `checked`."""
    total = _sum(payload, pair)
    if generator.random() >= checked:
        total += generator.choice((-1, 1))
    shown = "+".join(f"{letter}{payload['digits'][letter]}" for letter in pair.split("+"))
    return f"{shown}={total}. <verify>{'approve' if total == payload['target'] else 'reject'}</verify>"

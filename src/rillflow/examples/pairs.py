"""Two digits that make a sum: a question that is harder to solve than to check.

`3,6,1. Which two make 7?` A solver has to search the pairs for `6+1`. A verifier adds the two digits of a solution and
compares the sum. The splits ask different questions, though about the same sets of digits. A guess among three digits
is right in a third of the cases, so a solver that knows the format only has something to learn from. No two digits of a
question make more than 9: a sum is one token, which the tiny policy can compare.

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

QUESTION = "{digits}. Which two make {target}?"
VERIFY = "{question}\n{solution}\nIs it right?"
RETRY = "{question}\n{verdict}"
_SHOWN_RIGHT = 0.5  # share of right solutions among those shown to the verifier
_MOST = 9  # of the sum of two digits
_PAIR = re.compile(r"(\d)\s*\+\s*(\d)")

Payload = Mapping[str, Any]


def questions(split: str, size: int = 3) -> list[tuple[tuple[int, ...], int]]:
    """Return all questions of `split`, each of `size` digits and a sum; a quarter of all is held out."""
    check_split(split)
    sets = [digits for digits in itertools.combinations(range(10), size) if sum(digits[-2:]) <= _MOST]
    found = [
        (order, target)
        for digits in sets
        for order in itertools.permutations(digits)
        for target in sorted({sum(pair) for pair in itertools.combinations(digits, 2)})
    ]
    random.Random(f"pairs/{size}").shuffle(found)
    cut = len(found) // 4
    return found[:cut] if split == "heldout" else found[cut:]


def prompts(split: str, count: int, seed: int, size: int = 3) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of `split`, each about `size` digits; a question comes again when all have been asked."""
    choices, generator = questions(split, size), random.Random(f"pairs/{split}/{seed}/{size}")
    for index in range(count):
        if index % len(choices) == 0:
            generator.shuffle(choices)
        digits, target = choices[index % len(choices)]
        question = QUESTION.format(digits=",".join(map(str, digits)), target=target)
        payload = {"question": question, "digits": list(digits), "target": target}
        yield {"id": f"pairs-{split}-{seed}-{index}", "payload": payload}


def reward(payload: Payload, answer: str | None) -> float:
    """Return 1.0 if the answer's last pair are two digits of the question that make the sum, else 0.0."""
    named = _PAIR.findall(answer or "")
    return float(bool(named) and _is_right(payload, (int(named[-1][0]), int(named[-1][1]))))


def _is_right(payload: Payload, pair: tuple[int, int]) -> bool:
    return pair[0] != pair[1] and set(pair) <= set(payload["digits"]) and sum(pair) == payload["target"]


# Demonstrations


def lessons(split: str, count: int, seed: int, right: float = 0.5, checked: float = 0.9) -> Iterator[dict[str, Any]]:
    """Yield `count` rows for sft: solutions, verdicts and retries in turn."""
    generator = random.Random(f"pairs_lessons/{split}/{seed}")
    for index, prompt in enumerate(prompts(split, count, seed)):
        payload, kind = prompt["payload"], index % 3
        if kind == 0:
            asked, answer = payload["question"], _written(_solution(payload, generator, right))
        elif kind == 1:
            shown = _solution(payload, generator, _SHOWN_RIGHT)
            asked = VERIFY.format(question=payload["question"], solution=_written(shown))
            answer = _verdict(payload, shown, generator, checked)
        else:
            rejected = _solution(payload, generator, 0.0)
            asked = RETRY.format(question=payload["question"], verdict=_verdict(payload, rejected, generator, 1.0))
            answer = _written(_solution(payload, generator, right, apart=rejected))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        yield {"id": prompt["id"], "payload": {"messages": messages}}


def _solution(
    payload: Payload, generator: random.Random, right: float, apart: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return a right pair with probability `right`, else a wrong one that is not `apart`."""
    wanted = generator.random() < right
    pairs = itertools.combinations(payload["digits"], 2)
    return generator.choice([pair for pair in pairs if pair != apart and _is_right(payload, pair) == wanted])


def _written(pair: tuple[int, int]) -> str:
    return f"{pair[0]}+{pair[1]}"


def _verdict(payload: Payload, pair: tuple[int, int], generator: random.Random, checked: float) -> str:
    """Return the sum of a pair, how far it is from the wanted sum, and the verdict that follows.

    The sum is off by one unless `checked`. The tiny policy learns to subtract neighbouring digits in the few hundred
    steps of its warm start; it did not learn to compare two sums that it had written side by side.
    """
    total = sum(pair)
    if generator.random() >= checked:
        total += 1 if total == 0 else -1 if total == _MOST else generator.choice((-1, 1))
    target = payload["target"]
    apart = total - target
    found = f"{_written(pair)}={total}, {total}-{target}={apart}"
    return f"{found}: <verify>{'reject' if apart else 'approve'}</verify>"

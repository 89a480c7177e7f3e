"""When two answers are the same, for the vote of a majority.

An answer's key is what is left of it once the words around are gone. None: there is nothing to vote for. Two different
spellings of one formula are two keys; only the reward knows that they are equal.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Literal

from rillflow.agents.rewards.answers import inside, text_of
from rillflow.agents.rewards.qa import normalised

Kind = Literal["math", "code", "text"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_BOXED = "\\boxed{"
_LONGEST = 100  # places before or behind the point that are written out


def vote(kind: Kind, answer: Any) -> str | None:
    """The key of an answer; programs have none: two that do the same look different."""
    text = text_of(answer)
    if not text or kind == "code":
        return None
    if kind == "math":
        return _math(text)
    return normalised(inside(text, "answer") or text) or None


def _math(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return _canonical(boxed)
    _, marked, after = text.rpartition("####")
    numbers = _NUMBER.findall(after if marked else text)
    return _canonical(numbers[0] if marked else numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{…}, with balanced braces."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth, start = 1, begin + len(_BOXED)
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def _canonical(text: str) -> str | None:
    plain = re.sub(r"\s+|\\[,;! ]|\\left|\\right|\$", "", text).rstrip(".")
    try:
        number = Decimal(plain.replace(",", ""))
        # 1e999999 is short, its digits are not: it votes as it is written.
        if number.is_finite() and abs(number.adjusted()) <= _LONGEST:
            return f"{number.normalize():f}"
    except ArithmeticError:
        pass
    return plain or None

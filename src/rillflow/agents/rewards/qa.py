"""Comparing short answers to questions, normalised as SQuAD's evaluation does it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", _bare(text)).split())


def exact(answer: str, golds: Sequence[str]) -> float:
    """1.0 if the answer is one of the right ones, else 0.0."""
    return float(any(said == right for said, right in _compared(answer, golds)))


def f1(answer: str, golds: Sequence[str]) -> float:
    """How many words an answer and a right one share, as the harmonic mean of precision and recall; the best counts."""
    return max(_f1(said.split(), right.split()) for said, right in _compared(answer, golds))


def _compared(answer: str, golds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The answer and each right one, in the form in which they are compared: normalised; with articles where the right
    one is nothing else (the choice "A"); as it is where it is nothing but punctuation. Else any answer of which nothing
    is left would be right."""
    for gold in golds:
        form = next((form for form in (normalised, _bare) if form(gold)), _as_it_is)
        yield form(answer), form(gold)


def _bare(text: str) -> str:
    return text.lower().translate(_PUNCTUATION).strip()


def _as_it_is(text: str) -> str:
    return text.strip().casefold()


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:  # a right answer may be nothing at all
        return float(said == gold)
    shared = sum((Counter(said) & Counter(gold)).values())
    return 2 * shared / (len(said) + len(gold))

"""Comparing short answers to questions, normalised as SQuAD's evaluation does it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, golds: Sequence[str]) -> float:
    """1.0 if the answer is one of the right ones, else 0.0."""
    return float(normalised(answer) in {normalised(gold) for gold in golds})


def f1(answer: str, golds: Sequence[str]) -> float:
    """How many words an answer and a right one share, as the harmonic mean of precision and recall; the best counts."""
    return max(_f1(normalised(answer).split(), normalised(gold).split()) for gold in golds)


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:  # a right answer may be nothing but an article
        return float(said == gold)
    shared = sum((Counter(said) & Counter(gold)).values())
    return 2 * shared / (len(said) + len(gold))

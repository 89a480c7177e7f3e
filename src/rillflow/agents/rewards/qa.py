"""Rewards of short answers, normalised as SQuAD's evaluation does it: `exact_match` and `f1`."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from rillflow.agents.rewards.base import ShippedReward, golds, inside, text_of

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class _ShortAnswer(ShippedReward):
    """The options of both rewards."""

    key: str | None = Field(None, description="of the payload that holds the right answer, or a list of them")
    inside: str | None = Field(None, description="only what the last <TAG>…</TAG> holds is the answer; give the tag")

    def _taken(self, answer: Any) -> str | None:
        text = text_of(answer)
        return text if self.inside is None else inside(text, self.inside)


class ExactMatch(_ShortAnswer):
    """1 if the answer is one of the prompt's right ones (case, punctuation and articles do not count), else 0."""

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Compare the answer with each right one."""
        right, taken = golds(payload, self.key), self._taken(answer)
        return 0.0 if not taken else exact(taken, right)


class F1(_ShortAnswer):
    """0 to 1: F1 of the words that the answer shares with the prompt's right one, the best of several."""

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        """Compare the answer's words with those of each right one."""
        right, taken = golds(payload, self.key), self._taken(answer)
        return 0.0 if not taken else f1(taken, right)


def normalised(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", _bare(text)).split())


def exact(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the answer is one of the right ones, else 0.0."""
    return float(any(said == right for said, right in _compared(answer, golds)))


def f1(answer: str, golds: Sequence[str]) -> float:
    """Return the F1 of the words that the answer shares with a right one; the best of several counts."""
    return max(_f1(said.split(), right.split()) for said, right in _compared(answer, golds))


def _compared(answer: str, golds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the answer and each right one in the form in which they are compared.

    That is the normalised form; with articles if the right one consists of articles (the choice "A"); unchanged if it
    consists of punctuation. Otherwise every answer that normalises to nothing would be right.
    """
    for gold in golds:
        form = next((form for form in (normalised, _bare) if form(gold)), _as_it_is)
        yield form(answer), form(gold)


def _bare(text: str) -> str:
    return text.lower().translate(_PUNCTUATION).strip()


def _as_it_is(text: str) -> str:
    return text.strip().casefold()


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:  # a right answer may be empty
        return float(said == gold)
    shared = sum((Counter(said) & Counter(gold)).values())
    return 2 * shared / (len(said) + len(gold))

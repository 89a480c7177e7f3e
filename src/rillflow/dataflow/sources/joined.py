"""Several sources one after the other, each once: what an evaluation plays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rillflow.contracts import PromptSource
from rillflow.types import Prompt


class Joined:
    """`parts` are names, each once and without a slash, and sources. Ids and prompts name the source they are of."""

    def __init__(self, parts: Sequence[tuple[str, PromptSource]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(source.length for _, source in parts))

    @property
    def length(self) -> int:
        return self._ends[-1]

    def at(self, index: int) -> Prompt:
        index %= self.length
        which = bisect_right(self._ends, index)
        name, source = self._parts[which]
        prompt = source.at(index - (self._ends[which - 1] if which else 0))
        return Prompt(id=f"{name}/{prompt.id}", payload=prompt.payload, source=name)

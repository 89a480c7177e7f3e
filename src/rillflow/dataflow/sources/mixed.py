"""Several sources as one, their prompts interleaved by weight.

The k-th prompt (from 0) of a source of weight w stands at the time (k + 1/2) / w; all prompts of all sources, in the
order of their times, are the mixture (Webster's apportionment). So the shares are the weights, exactly in the long
run and within a few prompts after any number of them; every source goes through its own epochs; and which prompt
stands at an index is computed from the index alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rillflow.contracts import PromptSource
from rillflow.types import Prompt


@dataclass(frozen=True)
class Part:
    """One source of a mixture; `name` is unique in it and has no slash."""

    name: str
    weight: float
    source: PromptSource


class Mixed:
    """`length`, one pass, is the fewest prompts after which every source was seen through at least once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._weights = _whole([part.weight for part in parts])
        self._total = sum(self._weights)
        common = math.lcm(*self._weights)
        self._steps = [common // weight for weight in self._weights]
        self.length = 1 + max(self._index(which, part.source.length - 1) for which, part in enumerate(parts))

    def at(self, index: int) -> Prompt:
        which, place = self._place(index)
        part = self._parts[which]
        prompt = part.source.at(place)
        return Prompt(id=f"{part.name}/{prompt.id}", payload=prompt.payload, source=part.name)

    def _place(self, index: int) -> tuple[int, int]:
        """Which source the prompt at `index` is of, and its position there.

        A source has floor(t * w + 1/2) prompts up to the time t, so all m have t * total, give or take m/2. Hence the
        time below has at most index - 1 prompts behind it and at least index - 1 - m: the few between are counted.
        """
        numerator, denominator = max(0, 2 * index - len(self._parts) - 2), 2 * self._total
        taken = [(2 * numerator * weight + denominator) // (2 * denominator) for weight in self._weights]
        for _ in range(index - sum(taken)):
            taken[self._next(taken)] += 1
        which = self._next(taken)
        return which, taken[which]

    def _next(self, taken: Sequence[int]) -> int:
        """The source whose next prompt has the earliest time; the first of equals."""
        return min(range(len(taken)), key=lambda which: (2 * taken[which] + 1) * self._steps[which])

    def _index(self, which: int, place: int) -> int:
        """Return the position in the mixture of the prompt at `place` of a source: the number of prompts with earlier
        times."""
        own, before = self._weights[which], 0
        for other, weight in enumerate(self._weights):
            # Odd numbers o with o / weight < (2 * place + 1) / own; or equal, for the sources that go first.
            most = ((2 * place + 1) * weight - (other >= which)) // own
            before += (most + 1) // 2
        return before


def _whole(weights: Sequence[float]) -> list[int]:
    """Integers in exactly the same proportions as the weights were written (0.1 is a tenth)."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]

"""Prompts of several sources in given shares, by error diffusion.

Every prompt played gives each source credit for its share and takes one from the source it came from; a prompt is
played where that leaves its source's credit above -1. Credits always add up to 0, so some source is always owed one:
shares are never off by more than the number of sources, whatever the order in which prompts are offered.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rillflow.config.base import Positive
from rillflow.contracts import Group
from rillflow.dataflow.hooks.keyed import KeyedState
from rillflow.dataflow.hooks.options import Weight, options
from rillflow.types import Prompt

_ROUNDING = 1e-9


class Mixing(KeyedState):
    """A source not offered for `patience` prompts has run out: the others share its place until it comes back.

    Prompts of sources without a weight are played and not counted.
    """

    @options
    def __init__(
        self, *, weights: Annotated[dict[str, Weight], Field(min_length=1)], patience: Positive = 1000
    ) -> None:
        super().__init__()
        self._weights, self._patience = weights, patience

    def admit(self, prompt: Prompt) -> bool:
        if prompt.source not in self._weights:
            return True
        now = self.get("offers", 0) + 1
        credits = self._present(prompt.source, now)
        total = sum(self._weights[source] for source in credits)
        owed = {source: credit + self._weights[source] / total for source, credit in credits.items()}
        played = owed[prompt.source] > _ROUNDING
        if played:
            owed[prompt.source] -= 1
            credits = owed
        self.put("offers", now)
        self.put("credits", credits)
        return played

    def _present(self, source: str, now: int) -> dict[str, float]:
        """The credits of the sources that are still offered, `source` among them. They add up to 0."""
        last: dict[str, int] = self.get("last", {}) | {source: now}
        present = {each: at for each, at in last.items() if each in self._weights and now - at <= self._patience}
        self.put("last", present)
        credits = {each: credit for each, credit in self.get("credits", {}).items() if each in present}
        if credits:  # what those that left were owed goes to those that stay
            over = sum(credits.values()) / len(credits)
            credits = {each: credit - over for each, credit in credits.items()}
        return {source: 0.0} | credits

    def observe(self, group: Group) -> None:
        """Shares are of prompts played, whatever came of them."""

    def on_version(self, version: int) -> None:
        """Shares stay the same."""

"""How much of a short answer is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rillflow.agents.rewards import qa
from rillflow.agents.rewards.answers import golds, inside, text_of
from rillflow.agents.rewards.shipped import ShippedReward


class F1(ShippedReward):
    """0 to 1: F1 of the words that the answer shares with the prompt's right one, the best of several."""

    key: str | None = Field(None, description="of the payload that holds the right answer, or a list of them")
    inside: str | None = Field(None, description="only what the last <TAG>…</TAG> holds is the answer; give the tag")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        right, said = golds(payload, self.key), text_of(answer)
        taken = said if self.inside is None else inside(said, self.inside)
        return 0.0 if not taken else qa.f1(taken, right)

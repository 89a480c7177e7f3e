"""Whether a short answer is a right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rillflow.agents.rewards import qa
from rillflow.agents.rewards.answers import golds, inside, text_of
from rillflow.agents.rewards.shipped import ShippedReward


class ExactMatch(ShippedReward):
    """1 if the answer is one of the prompt's right ones (case, punctuation and articles do not count), else 0."""

    key: str | None = Field(None, description="of the payload that holds the right answer, or a list of them")
    inside: str | None = Field(None, description="only what the last <TAG>…</TAG> holds is the answer; give the tag")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        right, said = golds(payload, self.key), text_of(answer)
        taken = said if self.inside is None else inside(said, self.inside)
        return 0.0 if not taken else qa.exact(taken, right)

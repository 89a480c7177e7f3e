"""reasoning-gym's own scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rillflow.agents.rewards.answers import inside, last_number, text_of
from rillflow.agents.rewards.grading.pool import grade, prepare
from rillflow.agents.rewards.shipped import ShippedReward, need
from rillflow.config.base import Seconds
from rillflow.errors import RewardError

_MOST = 1 << 16  # characters of an answer


class ReasoningGym(ShippedReward):
    """0 to 1: what the scorer of the reasoning-gym task says that the prompt is from."""

    inside: str | None = Field(None, description="only what the last <TAG>…</TAG> holds is the answer; give the tag")
    last_number: bool = Field(False, description="only the last number of the answer counts")
    strict: bool = Field(
        False, description="full marks or 0: many tasks give some for a right answer among other words"
    )
    seconds: Seconds = Field(5.0, description="of computing that scoring may take; beyond that there is no reward")

    def model_post_init(self, context: Any) -> None:
        need("reasoning_gym", "reasoning-gym")

    async def prepare(self) -> None:
        await prepare("reasoning_gym")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        lacking = [key for key in ("answer", "metadata", "source_dataset") if key not in payload]
        if lacking:
            raise RewardError(
                f"the prompt is none of reasoning-gym's: it has no {lacking[0]}",
                "take prompts from `data.prompts: {reasoning_gym: …}`",
            )
        said = text_of(answer)[:_MOST]
        taken = said.strip() if self.inside is None else inside(said, self.inside)
        if self.last_number:
            taken = last_number(taken or "")
        if not taken:
            return 0.0
        score = await grade("reasoning_gym", self.seconds, entry=dict(payload), answer=taken)
        return float(score >= 1.0) if self.strict else score

"""Whether an answer to a question of mathematics is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rillflow.agents.rewards.answers import golds, text_of
from rillflow.agents.rewards.grading.pool import grade, prepare
from rillflow.agents.rewards.shipped import ShippedReward, need
from rillflow.config.base import Seconds

_MOST = 4096  # characters at the end of an answer, where its result is


class Math(ShippedReward):
    """1 if the answer means the same number or expression as the prompt's (math-verify), else 0."""

    key: str | None = Field(None, description="of the payload that holds the right answer, or a solution that ends so")
    boxed: bool = Field(False, description="only what stands in \\boxed{…} counts")
    seconds: Seconds = Field(5.0, description="of computing that comparing may take; beyond that there is no reward")

    def model_post_init(self, context: Any) -> None:
        need("math_verify", "math")

    async def prepare(self) -> None:
        await prepare("math")

    async def __call__(self, payload: Mapping[str, Any], answer: Any) -> float:
        right, said = golds(payload, self.key), text_of(answer)[-_MOST:]
        if not said.strip():
            return 0.0
        for gold in right:
            if await grade("math", self.seconds, gold=gold, answer=said, boxed=self.boxed):
                return 1.0
        return 0.0

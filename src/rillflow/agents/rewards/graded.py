"""Rewards that a grader computes in a worker process: `math` and `reasoning_gym`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rillflow.agents.rewards.base import ShippedReward, golds, inside, last_number, need, text_of
from rillflow.agents.rewards.grading import grade, prepare
from rillflow.config.base import Seconds
from rillflow.errors import RewardError

_MATH_TAIL = 4096  # characters at the end of an answer, where its result is
_GYM_MOST = 1 << 16  # characters of an answer


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
        """Compare the end of the answer with each right one."""
        right, said = golds(payload, self.key), text_of(answer)[-_MATH_TAIL:]
        if not said.strip():
            return 0.0
        for gold in right:
            if await grade("math", self.seconds, gold=gold, answer=said, boxed=self.boxed):
                return 1.0
        return 0.0


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
        """Score the answer by the dataset's own scorer."""
        lacking = [key for key in ("answer", "metadata", "source_dataset") if key not in payload]
        if lacking:
            raise RewardError(
                f"not a reasoning-gym prompt: `{lacking[0]}` is missing from its payload",
                "take prompts from `data.prompts: {reasoning_gym: …}`",
            )
        said = text_of(answer)[:_GYM_MOST]
        taken = said.strip() if self.inside is None else inside(said, self.inside)
        if self.last_number:
            taken = last_number(taken or "")
        if not taken:
            return 0.0
        score = await grade("reasoning_gym", self.seconds, entry=dict(payload), answer=taken)
        return float(score >= 1.0) if self.strict else score

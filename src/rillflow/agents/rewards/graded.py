"""Rewards that a grader computes in a worker process: `math` and `reasoning_gym`.

Invariants: a grader that hangs is killed, and no other episode waits for it. A grade is the number that the grader
returned. A grader that hung, died or raised is a RewardError and never a grade.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import Field

from rillflow.agents.processes import Pool, Seat, WorkerFailed, WorkerLost
from rillflow.agents.rewards.base import ShippedReward, golds, inside, last_number, need, text_of
from rillflow.agents.rewards.graders import LOAD, OUT_OF_TIME
from rillflow.config.base import Seconds
from rillflow.errors import RewardError

_LOAD_SECONDS = 300.0  # for a process to start and to load a grader
_WAIT_SECONDS = 120.0  # for a free process
_SLOWER = 4.0  # wall time of a grading over its computing time, on a busy machine
_TRIES = 2  # a process that died is replaced once


def new_pool(size: int) -> Pool:
    """Return a pool of at most `size` graders."""
    command = ["rillflow.agents.rewards.graders:start"]
    return Pool("a grader", command, workers=size, idle=None, start_seconds=_LOAD_SECONDS)


@cache
def shared_pool() -> Pool:
    """Return the pool of this process. Two graders are enough for hundreds of answers a second."""
    return new_pool(max(2, min(8, (os.cpu_count() or 2) // 2)))


async def prepare(name: str) -> None:
    """Start all graders and let them load what they need, which takes longer than an answer may take."""
    pool = shared_pool()
    await asyncio.gather(*(_asked(pool, name, LOAD, {}) for _ in range(pool.size)))


async def grade(name: str, seconds: float, **arguments: Any) -> float:
    """Return the grade by the grader `name`, which may compute for `seconds`."""
    return await _asked(shared_pool(), name, seconds, arguments)


async def _asked(pool: Pool, name: str, seconds: float, arguments: dict[str, Any]) -> float:
    for _ in range(_TRIES):
        try:
            seat = await pool.take(_WAIT_SECONDS)
        except TimeoutError as error:
            raise RewardError(str(error), "lower `rollout.episodes`") from None
        try:
            return await _grade(seat, name, seconds, arguments)
        except WorkerFailed as error:
            raise RewardError(f"grading by {name}: {error}") from None
        except WorkerLost as error:
            if seconds == LOAD and error.late:
                raise RewardError(f"loading the grader {name} took longer than {_LOAD_SECONDS:g} s") from None
            if error.late or error.code == -OUT_OF_TIME:
                raise RewardError(
                    f"grading by {name} took longer than {seconds:g} s", "raise the reward's `seconds` in the recipe"
                ) from None
        finally:
            seat.give_back()
    raise RewardError(
        f"grading by {name}: its process died {_TRIES} times", "it may need more memory than the limit allows"
    )


async def _grade(seat: Seat, name: str, seconds: float, arguments: dict[str, Any]) -> float:
    """Let the process load the grader first if it has not: loading does not count as grading."""
    question = {"name": name, "arguments": arguments}
    if name not in seat.worker.known:
        await seat.call({**question, "seconds": LOAD}, _LOAD_SECONDS)
        seat.worker.known.add(name)
    if seconds == LOAD:
        return 0.0
    value: float = await seat.call({**question, "seconds": seconds}, seconds * _SLOWER)
    return value


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

"""Shared code of the multi-policy workflows: their options, the check of an answer, and their results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rillflow.agents.rewards.base import OF_ANSWERS, Given, call
from rillflow.agents.rewards.registry import load_reward
from rillflow.config import RewardConfig
from rillflow.config.base import Section
from rillflow.errors import WorkflowError

if TYPE_CHECKING:
    from rillflow.contracts import Episode

_RIGHT = 0.5  # an answer is right if its check gives more than this

Check = Callable[[str], Awaitable[float]]


class Options(Section):
    """The options of every multi-policy workflow."""

    check: str | list[RewardConfig] = Field("math", description="the reward that says whether an answer is right")
    prompts: dict[str, str] = Field(default_factory=dict, description="templates in place of the workflow's own")
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="of calls, by role: max_tokens, temperature, …"
    )

    def settings_of(self, role: str) -> dict[str, Any]:
        """Return the settings of a role's calls."""
        return self.settings.get(role, {})


def checker(episode: Episode, named: str | list[RewardConfig]) -> Check:
    """Return `check(text)`, which awaits the score of an answer to this prompt by the reward of `options.check`.

    It runs during the episode, so the reward can name only payload and answer.
    """
    score = _loaded(named) if isinstance(named, str) else load_reward(named, OF_ANSWERS)

    async def check(text: str) -> float:
        return float(await call(score, Given(episode.payload, text)))

    return check


def is_right(value: float) -> bool:
    """Return whether a score means a right answer."""
    return value > _RIGHT


def problem_of(episode: Episode) -> str:
    """Return the bare question: benchmarks keep it as `problem` beside a `question` with instructions."""
    payload = episode.payload
    return str(payload.get("problem") or payload["question"])


@cache
def _loaded(name: str) -> Callable[..., Any]:
    return load_reward(name, OF_ANSWERS)


def user(text: str) -> list[dict[str, Any]]:
    """Return a conversation that begins with this text of the user."""
    return [{"role": "user", "content": text}]


def outcome(episode: Episode, value: float, **others: float) -> dict[str, float]:
    """Return the rewards by policy: `value` is the solver's and the trajectory's, `others` are by role.

    If one policy plays several roles, it gets the trajectory's reward; single answers have their own rewards.
    """
    solver = episode.role("solver").policy
    if solver != episode.policies[0]:
        raise WorkflowError(
            f"the run's first policy is {episode.policies[0]}, but {solver} plays the solver",
            "name the solver's policy first in `policies`: its reward is what the run reports and evaluates",
        )
    return {episode.role(role).policy: worth for role, worth in others.items()} | {solver: value}

"""What the recipe may say of a multi-policy workflow (`options`), how its prompts are filled, and what it returns.

Invariant: what a model or a prompt wrote is put into a template as it is, and never read as a template itself.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from rillflow.agents.rewards.calling import OF_ANSWERS, Given, call
from rillflow.agents.rewards.registry import load_reward
from rillflow.config import RewardConfig
from rillflow.config.base import Section
from rillflow.config.load import validated
from rillflow.errors import ConfigError, WorkflowError

if TYPE_CHECKING:
    from rillflow.contracts import Episode

_PART = re.compile(r"\{([a-z]+)\}")
_RIGHT = 0.5  # an answer whose check says more than this is right

Check = Callable[[str], Awaitable[float]]
Fill = Callable[..., str]
OptionsT = TypeVar("OptionsT", bound="Options")


class Options(Section):
    """Of every multi-policy workflow."""

    check: str | list[RewardConfig] = Field("math", description="the reward that says whether an answer is right")
    prompts: dict[str, str] = Field(default_factory=dict, description="templates in place of the workflow's own")
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="of calls, by role: max_tokens, temperature, …"
    )

    def settings_of(self, role: str) -> dict[str, Any]:
        return self.settings.get(role, {})


def options_of(episode: Episode, kind: type[OptionsT]) -> OptionsT:
    """ConfigError, with the nearest valid name, for what the workflow does not know."""
    return validated(dict(episode.options), kind)


def filler(own: Mapping[str, str], given: Mapping[str, str]) -> Fill:
    """`fill("solve", question=…)`: the template of that name with its parts, the recipe's before the workflow's own."""
    unknown = [name for name in given if name not in own]
    if unknown:
        raise ConfigError(f"options.prompts: there is no prompt {unknown[0]!r}", f"there is {', '.join(own)}")
    templates = {**own, **given}

    def fill(name: str, **parts: str) -> str:
        return _PART.sub(lambda found: parts.get(found[1], found[0]), templates[name])

    return fill


def checker(episode: Episode, named: str | list[RewardConfig]) -> Check:
    """`await check(text)`: what the reward that `options.check` names says of an answer to this prompt.

    It is asked while the episode is played, so it can name payload and answer only.
    """
    score = _loaded(named) if isinstance(named, str) else load_reward(named, OF_ANSWERS)

    async def check(text: str) -> float:
        return float(await call(score, Given(episode.payload, text)))

    return check


def is_right(value: float) -> bool:
    return value > _RIGHT


def problem_of(episode: Episode) -> str:
    """The bare question: benchmarks keep it beside the one with instructions of their own."""
    payload = episode.payload
    return str(payload.get("problem") or payload["question"])


@cache
def _loaded(name: str) -> Callable[..., Any]:
    return load_reward(name, OF_ANSWERS)


def user(text: str) -> list[dict[str, Any]]:
    """A conversation that begins with these words."""
    return [{"role": "user", "content": text}]


def outcome(episode: Episode, value: float, **others: float) -> dict[str, float]:
    """Return what a workflow returns: the trajectory's reward is the solver's, `others` are by role.

    Where one policy plays several roles, the trajectory's reward is that policy's; answers have rewards of their own.
    """
    solver = episode.role("solver").policy
    if solver != episode.policies[0]:
        raise WorkflowError(
            f"the run's first policy is {episode.policies[0]}, but {solver} plays the solver",
            "name the solver's policy first in `policies`: its reward is what the run reports and evaluates",
        )
    return {episode.role(role).policy: worth for role, worth in others.items()} | {solver: value}

"""The `options` of a recipe whose workflow is the loop, and the prompts of the planner and the verifier.

Unknown keys are refused with the nearest valid name. A recipe may replace a prompt (`options.prompts`): `{question}`,
`{memory}`, `{actions}` and `{left}` (the steps that are left) are filled in; everything else stays, so a prompt may
show JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from rillflow.agents.memory import MemoryOptions
from rillflow.agents.options import fill_template
from rillflow.config import RewardConfig
from rillflow.config.base import Name, NonNegative, Positive, Seconds, Section
from rillflow.errors import ConfigError, did_you_mean

PROMPTS: dict[str, str] = {
    "planner": (
        "You plan, one step at a time, how a question is answered. Tools carry out each step for you.\n"
        "Write exactly one JSON object with the keys thought (why), action (one of: {actions}) and action_input (what "
        "the action gets). The action answer ends the task: its input is the final answer and nothing else.\n\n"
        "Question: {question}\n\nWhat was done so far:\n{memory}\n\nSteps left: {left}"
    ),
    "final": "{planner}\n\nEnough is known. The only action left is answer.",
    "verifier": (
        "Judge whether what was found is enough to answer a question for certain. When in doubt, it is not.\n"
        'Write exactly one JSON object: {"sufficient": true} or {"sufficient": false}.\n\n'
        "Question: {question}\n\nWhat was done so far:\n{memory}"
    ),
}


def asked(
    prompts: Mapping[str, str], part: str, *, question: str, memory: str, actions: str = "", left: int = 0
) -> str:
    """Return the text of one prompt; `part` is planner, final or verifier."""
    values = {"question": question, "memory": memory or "nothing", "actions": actions, "left": str(left)}
    if part == "final":
        values["planner"] = fill_template(prompts["planner"], values)
    return fill_template(prompts[part], values)


Share = Annotated[float, Field(ge=0, le=1)]


class Endpoint(Section):
    """A model behind any OpenAI-compatible server."""

    url: str = Field(description="up to and with /v1")
    model: str
    key_variable: str | None = Field(None, description="environment variable that holds the key")
    seconds: Seconds = Field(30.0, description="an answer that takes longer counts as none")


class StepRewardOptions(Section):
    """Rewards of single decisions: by a process reward model, or by playing each decision to the end."""

    model: str | None = Field(None, description="folder of a process reward model (`rillflow fit`)")
    continuations: NonNegative = Field(
        0, description="without a model: how often each decision is played to the end; its reward is the mean outcome"
    )
    actions: Positive = Field(
        6, description="decisions sampled from each state; the first well-formed one is carried out"
    )
    outcome: Share = Field(
        0.0,
        description="weight of the episode's outcome in the reward of a decision that was carried out; one that ends "
        "the episode is then worth its outcome; 0: the model's score alone",
    )
    results: bool = Field(
        True, description="false: the model does not read the results of earlier decisions (ablation)"
    )
    least: Annotated[float, Field(ge=0)] = Field(
        1e-3, description="nothing is learned from a state whose rewards have a smaller standard deviation"
    )
    gate: bool = Field(True, description="refuse a model that does not rank decisions above chance")
    seconds: Seconds = Field(20.0, description="for the model to score an episode")

    @model_validator(mode="after")
    def _one_way(self) -> StepRewardOptions:
        if (self.model is None) == (self.continuations == 0):
            raise ValueError("give either model or continuations")
        return self


class FlowOptions(Section):
    """`options` of a recipe whose workflow is `rillflow.agents.agentflow.loop:play`."""

    max_steps: Positive = Field(8, description="planner steps of an episode")
    max_tokens: Positive = Field(256, description="of one answer of the planner")
    longest: Positive = Field(400, description="characters of a thought or an action's input")
    structured: bool = Field(True, description="whether answers are held to their JSON schema while they are sampled")
    actions: dict[Name, Name] | None = Field(
        None, description="actions of the planner and the tools that carry them out; default: every tool by its name"
    )
    fallback: bool = Field(
        True, description="an episode without an answer ends with the last result of a tool; false: it has no answer"
    )
    verifier: Literal["role", "none"] | Endpoint = Field(
        "role", description="role: a policy plays it (list it under `untrained`); none: only `answer` ends; or a server"
    )
    memory: MemoryOptions | None = Field(None, description="remember earlier episodes; default: only the task")
    process_reward: StepRewardOptions | None = Field(
        None, description="rewards of single decisions; default: each carries the episode's outcome"
    )
    check: str | list[RewardConfig] | None = Field(
        None, description="the reward of an answer, for `process_reward` with continuations or an outcome"
    )
    prompts: dict[str, str] = Field(default_factory=dict, description="in place of our own: planner, final, verifier")

    @field_validator("prompts")
    @classmethod
    def _all(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(given.keys() - PROMPTS.keys()):
            raise ValueError(f"there is no prompt {unknown[0]!r}; there are {', '.join(PROMPTS)}")
        return PROMPTS | given

    @model_validator(mode="after")
    def _checked(self) -> FlowOptions:
        steps = self.process_reward
        if steps is not None and (steps.continuations or steps.outcome) and self.check is None:
            raise ValueError("process_reward needs the outcome of an answer: name its reward in `check`")
        return self


def read_options(options: Mapping[str, Any]) -> FlowOptions:
    """ConfigError where they do not fit."""
    try:
        return FlowOptions.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["options", *(str(part) for part in first["loc"])])
        raise ConfigError(f"{key}: {first['msg']}", _nearest(first["loc"])) from None


def _nearest(place: Sequence[int | str]) -> str:
    """Return the valid name that is nearest to the last part of `place`."""
    section = StepRewardOptions if len(place) > 1 and place[0] == "process_reward" else FlowOptions
    return did_you_mean(str(place[-1]), section.model_fields).rstrip() if place else ""

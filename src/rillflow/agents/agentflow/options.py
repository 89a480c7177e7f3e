"""What a recipe may say to the loop, in its `options`. Unknown keys are refused with the nearest valid name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from rillflow.agents.agentflow.prompts import PROMPTS
from rillflow.agents.memory.options import MemoryOptions
from rillflow.config.base import Name, Positive, Seconds, Section
from rillflow.errors import ConfigError, did_you_mean


class Endpoint(Section):
    """A model behind any OpenAI-compatible server."""

    url: str = Field(description="up to and with /v1")
    model: str
    key_variable: str | None = Field(None, description="environment variable that holds the key")
    seconds: Seconds = Field(30.0, description="an answer that takes longer counts as none")


class FlowOptions(Section):
    """`options` of a recipe whose workflow is `rillflow.agents.agentflow.loop:play`."""

    max_steps: Positive = Field(8, description="planner steps of an episode")
    max_tokens: Positive = Field(256, description="of one answer of the planner")
    longest: Positive = Field(400, description="characters of a thought or an action's input")
    structured: bool = Field(True, description="whether answers are held to their JSON schema while they are sampled")
    actions: dict[Name, Name] | None = Field(
        None, description="actions of the planner and the tools that carry them out; default: every tool by its name"
    )
    verifier: Literal["role", "none"] | Endpoint = Field(
        "role", description="role: a policy plays it (list it under `untrained`); none: only `answer` ends; or a server"
    )
    memory: MemoryOptions | None = Field(None, description="remember earlier episodes; default: only the task")
    process_reward: str | None = Field(None, description="folder of a process reward model: rewards of single steps")
    reward_seconds: Seconds = Field(20.0, description="for the process reward model to score an episode")
    prompts: dict[str, str] = Field(default_factory=dict, description="in place of our own: planner, final, verifier")

    @field_validator("prompts")
    @classmethod
    def _all(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(given.keys() - PROMPTS.keys()):
            raise ValueError(f"there is no prompt {unknown[0]!r}; there are {', '.join(PROMPTS)}")
        return PROMPTS | given


def read_options(options: Mapping[str, Any]) -> FlowOptions:
    """ConfigError where they do not fit."""
    try:
        return FlowOptions.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        nearest = did_you_mean(str(first["loc"][0]), FlowOptions.model_fields).rstrip()
        raise ConfigError(f"options.{key}: {first['msg']}", nearest) from None

"""Agents: tools, rewards, commands, rollout nodes and the gateway."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from rillflow.config.base import Name, Named, NonNegative, Positive, Seconds, Section


class McpConfig(Section):
    """A server of the Model Context Protocol: a program that is started, or a URL."""

    command: str | None = Field(None, description="command line of a server over standard input and output")
    url: str | None = Field(None, description="URL of a server over HTTP")
    environment: dict[str, str] = Field(default_factory=dict, description="variables added to the command's own")
    headers: dict[str, str] = Field(default_factory=dict, description="headers of every request to the URL")
    only: list[str] | None = Field(None, description="names of the tools that agents may use; default: all it has")
    fill: dict[str, str] = Field(
        default_factory=dict,
        description="arguments of its tools that are taken from the prompt's payload, by key; models do not see them",
    )

    @model_validator(mode="after")
    def _one(self) -> McpConfig:
        if (self.command is None) == (self.url is None):
            raise ValueError("give exactly one of `command` and `url`")
        return self


class ToolConfig(Section):
    """Something that agents may call: a tool by its name, a function with types, or what an MCP server has."""

    name: Name | None = Field(None, description="a tool that is shipped: python, search, web_search, …")
    function: str | None = Field(None, description="module:function or file.py:function; its types are its schema")
    mcp: McpConfig | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="of a tool that is shipped")
    timeout: Seconds = Field(10.0, description="a call that takes longer is answered with an error")
    output: Annotated[int, Field(ge=64, le=1 << 20)] = Field(
        8192, description="most characters of an answer; more is cut"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"function" if ":" in value else "name": value}
        return value

    @model_validator(mode="after")
    def _one(self) -> ToolConfig:
        if sum(given is not None for given in (self.name, self.function, self.mcp)) != 1:
            raise ValueError("give exactly one of `name`, `function` and `mcp`")
        return self


class RewardConfig(Named):
    """One part of a reward: a reward that is shipped, or module:function, with its options and its weight."""

    weight: Annotated[float, Field(ge=-1000, le=1000)] = Field(
        1.0, description="the rewards are added, each times its own"
    )


class CommandConfig(Section):
    """An agent that is a program of its own, started once for each episode."""

    run: str = Field(min_length=1, description="the command line; it finds the task and the gateway in its environment")
    folder: str | None = Field(None, description="where it runs; default: an empty folder of its own for each episode")
    environment: dict[str, str] = Field(default_factory=dict, description="variables added to its environment")
    output: Positive = Field(1 << 20, description="most bytes kept of what it writes")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"run": value} if isinstance(value, str) else value


class PauseConfig(Section):
    """Pauses of a node until newer weights come, for synchronous runs. Requests stay open."""

    episodes: Positive | None = Field(None, description="after this many finished episodes since the last weights")
    seconds: Seconds | None = Field(None, description="this long after the last weights")
    at_most: Seconds = Field(60.0, description="no pause is longer, even if no new weights come")


class RolloutConfig(Section):
    nodes: Positive = Field(1, description="rollout nodes that `rillflow run` starts")
    engines: NonNegative = Field(
        0,
        description="engine processes that `rillflow run` starts for all nodes; 0: each node samples itself",
    )
    pause_after: PauseConfig | None = Field(None, description="stop sampling until newer weights come")
    late_rewards: Annotated[float, Field(ge=0)] = Field(
        0.0, description="seconds after an episode's end in which its reward may still come over HTTP"
    )
    episodes: Positive = Field(64, description="episodes that one node plays at once")
    episode_timeout: Seconds = Field(60.0, description="an episode that takes longer is cut and retried")
    reward_timeout: Seconds = Field(20.0, description="a reward function that takes longer is retried")
    refresh_every: Seconds = Field(0.2, description="how often a node looks for newer weights")


class GatewayConfig(Section):
    """The bounds on agents' requests, each checked before the work that it bounds, and aliases of policies."""

    body: Positive = Field(4 << 20, description="bytes of one request")
    messages: Positive = Field(2048, description="of one request")
    tools: Positive = Field(128, description="of one request")
    choices: Positive = Field(64, description="answers to one request (`n`)")
    stops: Positive = Field(16, description="stop strings of one request")
    tokens: Positive = Field(1 << 20, description="tokens that one request may ask for, over all its answers")
    calls: Positive = Field(16384, description="calls of one session over its life")
    session_bytes: Positive = Field(256 << 20, description="bytes kept of one session")
    concurrent: Positive = Field(64, description="calls of one session that are sampled at once; more wait in order")
    waiting: NonNegative = Field(1024, description="calls of one session that wait for others of it; more get a 429")
    total: Positive = Field(4096, description="calls of all sessions at work at once; more get a 429")
    sessions: Positive = Field(4096, description="sessions open at once")
    aliases: dict[Annotated[str, Field(min_length=1, max_length=200)], Name] = Field(
        default_factory=dict, description="other names by which agents may ask for a policy: `{gpt-4o: agent}`"
    )

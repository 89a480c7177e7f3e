"""The sections of a recipe for agents: tools and rewards."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from rillflow.config.base import Name, Named, Seconds, Section


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

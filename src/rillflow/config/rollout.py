"""The prompts, the dataflow with its hooks and units, and what plays: tools, rewards, commands, nodes and gateway."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.config.base import Name, Named, NonNegative, Positive, Seconds, Section
from rillflow.types import Durability

_KINDS = ("path", "dataset", "reasoning_gym", "generator", "benchmark")


class SourceConfig(Section):
    """Where prompts come from: a file, a dataset, a generated task, a function or a benchmark. Give exactly one."""

    path: str | None = Field(
        None, description="JSONL (one object a line) or Parquet file; relative paths are relative to the recipe"
    )
    dataset: str | None = Field(None, description="Hugging Face dataset: a name on the hub or a local folder")
    reasoning_gym: str | None = Field(None, description="name of a reasoning-gym dataset; `arguments` configure it")
    generator: str | None = Field(None, description="module:function or file.py:function that yields prompts")
    benchmark: str | None = Field(
        None, description="a public benchmark by its name (gsm8k, math500, …) or reasoning_gym:NAME; docs/evaluation.md"
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="of the generator, the reasoning-gym dataset, `datasets.load_dataset` (split, name, …) or the "
        "benchmark (template)",
    )
    id_key: str = Field("id", description="key of a row's id; rows without it are numbered")
    limit: Positive | None = Field(None, description="use only the first rows")
    name: Name | None = Field(None, description="what prompts of this source are called, where there are several")
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0, description="share of prompts that come from this source, where there are several"
    )

    @property
    def origin(self) -> str:
        """The path or name of the source."""
        return next(filter(None, (getattr(self, kind) for kind in _KINDS)), "")

    @model_validator(mode="after")
    def _one_kind(self) -> SourceConfig:
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise ValueError("give exactly one of `path`, `dataset`, `reasoning_gym`, `generator` and `benchmark`")
        return self


class DataConfig(Section):
    prompts: list[SourceConfig] = Field(
        min_length=1, description="prompts to train on: one source, or several that are mixed by their weights"
    )
    heldout: list[SourceConfig] = Field(
        default_factory=list,
        description="prompts to evaluate on; never trained: one source, or several whose mean rewards are averaged",
    )
    shuffle: bool = Field(True, description="a new order every epoch, fixed by the seed")
    epochs: Positive | None = Field(None, description="stop after this many passes (default: as many as needed)")

    @field_validator("prompts", "heldout", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """Accept a single source without a list around it, and null for none."""
        return [value] if isinstance(value, dict) else [] if value is None else value


class HookConfig(Named):
    """A data algorithm, written as its name (or module:Class), or as a mapping of that name to its options."""


class UnitsConfig(Section):
    """The storage of payloads."""

    count: Positive = Field(1, description="storage units that `rillflow run` starts, each its own process")
    kind: Literal["files", "redis"] = Field("files", description="segments in the run folder, or a Redis server")
    redis: str = Field("redis://127.0.0.1:6379/0", description="URL of the server, for kind redis")
    durability: Durability = Field(
        "process",
        description="what an acknowledged row survives: the kill of any process (process; a power failure may take the "
        "latest rows, whose episodes are played again), or a power failure too (machine; each put is synced first)",
    )
    segment_bytes: Positive = Field(64 << 20, description="size at which a segment is closed")
    timeout: Seconds = Field(60.0, description="seconds without a heartbeat after which a unit's rows are played again")
    drop_after: Seconds = Field(600.0, description="seconds after which a segment without a needed row is dropped")


class DataflowConfig(Section):
    ledgers: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="processes that share the run's prompts by the hash of their ids, each with its own ledger and "
        "`units.count` storage units",
    )
    group_size: Positive = Field(8, description="episodes of one prompt")
    grouping: Literal["policy", "agent", "turn", "state"] = Field(
        "policy",
        description="what a sample is compared with: all samples of its prompt by the same policy, only those of the "
        "same agent (Dr. MAS), only those of the same agent and turn (AT-GRPO), or only the answers to the same call, "
        "which were sampled from the same state (AgentFlow-Pro)",
    )
    staleness: NonNegative = Field(2, description="most versions between sampling and training; 0 is on-policy")
    filters: list[HookConfig] = Field(
        [HookConfig(name="zero_variance")], description="names, module:Class or {name: options}, in order"
    )
    sampler: HookConfig = Field(
        HookConfig(name="earliest_deadline"), description="name, module:Class or {name: options}"
    )
    curators: list[HookConfig] = Field(
        default_factory=list, description="names, module:Class or {name: options}, in order"
    )
    hook_timeout: Seconds = Field(
        10.0, description="a curator, filter or sampler of yours that takes longer for one call has failed it"
    )
    units: UnitsConfig = UnitsConfig()
    group_deadline: Seconds | None = Field(
        None, description="seconds after its first lease after which an incomplete group goes on without the rest"
    )
    balance_every: Positive = Field(10, description="versions between two balance reports")
    attempts: Positive = Field(3, description="how often a task is tried before it counts as failed")
    task_lease: Seconds = Field(30.0, description="seconds after which a lease that is not renewed expires")
    batch_lease: Seconds = Field(
        300.0, description="seconds after which a batch that is not committed returns to its stream"
    )
    node_timeout: Seconds = Field(10.0, description="seconds without a heartbeat after which a node counts as gone")
    commit_interval: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="least seconds between two writes of the ledger; those who come meanwhile share a sync"
    )
    max_failures: Positive = Field(
        64, description="the run stops when this many tasks in a row have failed and none has succeeded"
    )


# ---------------------------------------------------------------- what plays


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

    episodes: Positive | None = Field(
        None, description="after this many training episodes that finished since the last weights"
    )
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
    staggered: bool = Field(
        False,
        description="at most half of the engines that serve a policy change their weights at once; false: each does "
        "when it is ready",
    )


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

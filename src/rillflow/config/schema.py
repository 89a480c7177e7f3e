"""The schema of a recipe. Every key has a default or is required; every bound is checked here, once.

A recipe is YAML; `load.load_recipe` turns it into a `Recipe`, or raises a ConfigError that names the key, the mistake
and the nearest valid name. The resolved recipe is written into every run.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rillflow.config.agents import RewardConfig, ToolConfig
from rillflow.config.base import Name, Named, NonNegative, Positive, Seconds, Section
from rillflow.config.engine import EngineConfig
from rillflow.config.resources import ResourcesConfig
from rillflow.config.stages import StageConfig
from rillflow.config.trackers import OpenTelemetryConfig, TrackersConfig
from rillflow.config.trainer import TrainerConfig
from rillflow.config.weights import WeightsConfig
from rillflow.types import Durability

_KINDS = ("path", "dataset", "reasoning_gym", "generator", "benchmark")
# How an episode may end without an answer; the detail is a command's exit code or the name of a workflow's exception.
_END = re.compile(r"agent_error(\.-?\d+)?|workflow_error(\.\w+)?|context_overflow|timeout")


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


class SamplingConfig(Section):
    """How a policy samples."""

    wins: Literal["recipe", "agent"] | None = Field(
        None,
        description="whose temperature, top_p and top_k apply if an agent asks for its own: the recipe's or the "
        "agent's; default: the recipe's, but for a workflow its own requests",
    )
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_tokens: Positive = 128


# The formats' classes are the gateway's, in gateway/reading/formats.py.
TOOL_FORMATS = (
    "auto", "hermes", "qwen3_coder", "glm", "minimax", "seed", "mistral", "mistral_args", "deepseek", "deepseek_r1",
    "kimi", "harmony", "command", "nemotron", "phi", "granite", "llama3", "pythonic", "json",
)  # fmt: skip
REASONING_FORMATS = ("auto", "none", "harmony", "seed", "command", "mistral", "think")


class PolicyConfig(Section):
    model: str = Field(description="folder of a Hugging Face model, or `tiny` for the shipped policy")
    staleness: NonNegative | None = Field(None, description="default: dataflow.staleness")
    trains_on: list[Name] | None = Field(
        None, min_length=1, description="policies whose samples its trainer gets; default: its own"
    )
    stages: dict[Name, StageConfig] = Field(
        default_factory=dict,
        description="workers that add columns to every sample before the trainer gets it, by name; docs/stages.md",
    )
    tools: str = Field(
        "auto",
        description="how the model writes tool calls: the name of a format (docs/templates.md) or module:Class; auto "
        "finds it by what the chat template writes for a call",
    )
    reasoning: str = Field(
        "auto",
        description="how the model writes its reasoning: the name of a format (docs/templates.md), module:Class or "
        "none; auto looks at the chat template",
    )
    chat_template: str | None = Field(None, description="file of a chat template that replaces the model's own")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the chat template, such as {enable_thinking: false}; a call's own go before them",
    )
    history: Literal["template", "append"] = Field(
        "template",
        description="where the chat template rewrites earlier answers (it drops old reasoning, say): a call follows "
        "the template and begins a new path, or new messages are appended to what was sampled",
    )
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()

    @field_validator("tools", "reasoning")
    @classmethod
    def _known_format(cls, name: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tools" else REASONING_FORMATS
        if name not in known and ":" not in name:
            close = difflib.get_close_matches(name, known, 1)
            near = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{near}one of {', '.join(known)}, or a class of your own as module:Class")
        return name

    @field_validator("trains_on")
    @classmethod
    def _once(cls, names: list[str] | None) -> list[str] | None:
        """Refuse a policy that is named twice: its samples would wait for a second commit that never comes."""
        if names is not None and len(set(names)) < len(names):
            raise ValueError("it names one twice")
        return names

    @property
    def writes_deltas(self) -> bool:
        """True if its versions are published as deltas, false if each is published whole."""
        mode, narrow = self.weights.mode, self.engine.dtype == "bf16"
        # Adapters are small, and every weight of them changes at every step.
        return self.trainer.lora is None and (mode == "delta" or (mode == "auto" and narrow))

    @property
    def proves(self) -> bool:
        """True if engines must reproduce a version's probe before they serve it."""
        return self.weights.probe != "off"


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
    group_size: Positive = Field(8, description="episodes of one prompt")
    grouping: Literal["policy", "agent", "turn"] = Field(
        "policy",
        description="what a sample is compared with: all samples of its prompt by the same policy, only those of the "
        "same agent (Dr. MAS), or only those of the same agent and turn (AT-GRPO)",
    )
    staleness: NonNegative = Field(4, description="most versions between sampling and training; 0 is on-policy")
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


class PauseConfig(Section):
    """When a node stops sampling until newer weights come, as a synchronous run wants it. Requests stay open."""

    episodes: Positive | None = Field(None, description="after this many finished episodes since the last weights")
    seconds: Seconds | None = Field(None, description="this long after the last weights")
    at_most: Seconds = Field(60.0, description="no pause is longer, even if no new weights come")


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


class EvaluationConfig(Section):
    every: NonNegative = Field(0, description="versions between evaluations; 0: before and after training only")
    repeats: Positive = Field(1, description="episodes of each held-out prompt")
    target: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None,
        description="held-out reward that ends the run, as soon as an evaluation without failed episodes has reached "
        "it; trainer.steps stays the upper bound",
    )


class TrajectoriesConfig(Section):
    """The number of trajectories that a run keeps for people, apart from the rows that training needs. Older ones are
    removed so that the rest stays spread over the run."""

    max_bytes: NonNegative = Field(256 << 20, description="of the file; 0 keeps none")
    per_step: NonNegative = Field(2, description="drawn from each step, beside its best and its worst")
    per_evaluation: NonNegative = Field(16, description="drawn from each evaluation: of the same prompts each time")
    sample: NonNegative = Field(1500, description="most of those that were drawn from steps")
    best: NonNegative = Field(500, description="most of the steps' best")
    worst: NonNegative = Field(500, description="most of the steps' worst")
    failure: NonNegative = Field(500, description="most of the episodes that failed")
    evaluation: NonNegative = Field(1000, description="most of the evaluations'")

    @property
    def keeps_failures(self) -> bool:
        return self.max_bytes > 0 and self.failure > 0

    @field_validator("max_bytes")
    @classmethod
    def _enough(cls, given: int) -> int:
        if 0 < given < 1 << 20:
            raise ValueError("give at least 1048576 bytes, or 0 to keep none")
        return given


class ObserveConfig(Section):
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    trackers: TrackersConfig = TrackersConfig()
    opentelemetry: OpenTelemetryConfig | None = Field(None, description="sends the run's spans to a receiver")
    plot: bool = Field(True, description="draw reward.png and timeline.png at the end of a run")


class RuntimeConfig(Section):
    mode: Literal["asynchronous", "colocated", "multiplexed"] = Field(
        "asynchronous",
        description="nodes and trainers at work at once, each worker with one tag; colocated: all workers have both "
        "tags and generate a batch, then train on it; multiplexed: trainers have both and sample while they wait, "
        "beside nodes that only sample",
    )
    deterministic: bool = Field(
        False,
        description="on-policy, one sequence per forward pass: a resumed run is bit-identical, and engine and trainer "
        "agree to the bit (slow)",
    )
    host: str = "127.0.0.1"
    port: NonNegative = Field(0, description="of the dataflow service; 0 takes any free one")
    threads: NonNegative = Field(1, description="torch threads of each process; 0 leaves torch's default")
    restarts: NonNegative = Field(
        5,
        description="how often in a row a process that died is started again before the run fails; those before the "
        "last five minutes in which the run got on are forgotten",
    )
    start_timeout: Seconds = 120.0
    preload: bool = Field(
        True,
        description="import torch once, in a process that trainers and nodes of this machine are forked from (Linux); "
        "false starts each as a new process",
    )
    weights_server: bool = Field(
        False, description="serve the run's weights over HTTP, for nodes and relays that do not see its folder"
    )
    weights_port: NonNegative = Field(
        0, description="of the weight server; 0 takes any free one, and the same again after a restart"
    )


class Recipe(Section):
    """A whole experiment."""

    name: Name
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    policies: dict[Name, PolicyConfig] = Field(min_length=1)
    workflow: str | None = Field(None, description="module:function or file.py:function, `async def play(episode)`")
    command: CommandConfig | None = Field(None, description="an agent as a command line, in place of a workflow")
    outside: bool = Field(False, description="agents from outside take the tasks, in place of a workflow")
    reward: str | list[RewardConfig] | None = Field(
        None,
        description="a reward that is shipped, module:function (`reward(payload, answer) -> float`), or a list of such "
        "with weights; without it the workflow returns it",
    )
    rewards: Literal["recipe", "agent"] = Field(
        "recipe",
        description="who gives rewards: the recipe (`reward`, else its workflow or a program with a node's token), or "
        "also the agent, over HTTP with its session's key",
    )
    ends: dict[str, Annotated[float, Field(allow_inf_nan=False)] | Literal["retry"]] = Field(
        default_factory=dict,
        description="what an episode is worth that ended without an answer, by how it ended (agent_error, "
        "workflow_error, context_overflow, timeout; agent_error.3 is one exit code, workflow_error.ValueError one "
        "exception): a reward, or `retry`; ends that are not named are retried",
    )
    roles: dict[Name, Name] = Field(
        default_factory=dict,
        description="which policy plays a role of the workflow; default: the policy of that name, or the first",
    )
    untrained: list[Name] = Field(
        default_factory=list, description="roles whose answers are never trained on, though their policy is trained"
    )
    tools: list[ToolConfig] = Field(default_factory=list, description="what agents may call, as `episode.tools`")
    environment: HookConfig | None = Field(
        None, description="name, module:Class or {name: options}; every episode has its own, as `episode.environment`"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="of the workflow, as `episode.options`")
    data: DataConfig
    dataflow: DataflowConfig = DataflowConfig()
    rollout: RolloutConfig = RolloutConfig()
    gateway: GatewayConfig = GatewayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()
    resources: ResourcesConfig = ResourcesConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if sum((self.workflow is not None, self.command is not None, self.outside)) != 1:
            raise ValueError("give exactly one of `workflow`, `command` and `outside: true`: who plays the episodes")
        bounds = {name: self.staleness(name) for name in self.policies}
        if self.runtime.deterministic and any(bounds.values()):
            raise ValueError("runtime.deterministic needs dataflow.staleness=0: only on-policy runs are repeatable")
        self._check_workers()
        self._check_target()
        self._check_rewards()
        for role, policy_name in self.roles.items():
            if policy_name not in self.policies:
                raise ValueError(f"roles.{role} names {policy_name!r}; there is {', '.join(self.policies)}")
        for alias, policy_name in self.gateway.aliases.items():
            if policy_name not in self.policies:
                raise ValueError(f"gateway.aliases.{alias} names {policy_name!r}; there is {', '.join(self.policies)}")
            if alias in self.policies:
                raise ValueError(f"gateway.aliases.{alias} is the name of a policy: an alias needs another one")
        for name, policy in self.policies.items():
            for other in policy.trains_on or ():
                if other not in self.policies:
                    raise ValueError(f"policies.{name}.trains_on names {other!r}; there is {', '.join(self.policies)}")
        return self

    @field_validator("ends")
    @classmethod
    def _known_ends(cls, ends: dict[str, Any]) -> dict[str, Any]:
        for end in ends:
            if not _END.fullmatch(end):
                raise ValueError(
                    f"{end!r} is not an end of an episode: give agent_error, agent_error.CODE, workflow_error, "
                    "workflow_error.EXCEPTION, context_overflow or timeout"
                )
        return ends

    def _check_target(self) -> None:
        if self.evaluation.target is None:
            return
        if not self.data.heldout:
            raise ValueError(
                "evaluation.target needs data.heldout: it is a reward on held-out prompts, and the recipe has none; "
                "give some, or evaluation.target=null"
            )
        if not self.evaluation.every:
            raise ValueError(
                "evaluation.target needs evaluation.every above 0: without evaluations during training it cannot end "
                "the run; set it, or evaluation.target=null"
            )

    def _check_rewards(self) -> None:
        if self.reward is not None and self.rewards == "agent":
            raise ValueError(
                "`reward` and `rewards: agent` exclude each other: the reward function is final, and nothing would "
                "read the agent's rewards; leave one of them out"
            )
        if self.command is not None and self.reward_givers == "run" and not self.rollout.late_rewards:
            raise ValueError(
                "nothing rewards the command: name `reward`, let the agent reward itself (`rewards: agent`), or wait "
                "for rewards that are sent with the node's token (rollout.late_rewards)"
            )
        for name in self.policies:
            if self.step_rewards(name) in ("own", "to_go") and any(worth != "retry" for worth in self.ends.values()):
                raise ValueError(
                    f"policies.{name}.trainer.step_rewards={self.step_rewards(name)} reads rewards of answers only: "
                    "nothing would read the rewards in `ends`; leave one of them out"
                )
            if self.step_rewards(name) is not None and self.workflow is None and self.reward is not None:
                raise ValueError(
                    f"policies.{name}.trainer.step_rewards: nothing would reward single answers; `reward` rewards "
                    "whole episodes, and the agent gives no rewards; leave step_rewards out"
                )

    def step_rewards(self, policy: str) -> Literal["own", "to_go", "sum"] | None:
        """Return the `trainer.step_rewards` of those that train on a policy's samples; they have to agree."""
        readers = [name for name, one in self.policies.items() if policy in (one.trains_on or [name])]
        found = {self.policies[name].trainer.step_rewards for name in readers or [policy]}
        if len(found) > 1:
            raise ValueError(
                f"trainer.step_rewards differs among {', '.join(readers)}, which train on the same samples of "
                f"{policy}: give all of them the same"
            )
        return found.pop()

    @property
    def reward_givers(self) -> Literal["nobody", "run", "agent"]:
        """The clients that may give rewards over HTTP: none if a reward function decides, else a holder of the node's
        token (`run`), and also the agent if the recipe says so."""
        if self.reward is not None:
            return "nobody"
        return "agent" if self.rewards == "agent" else "run"

    def _check_workers(self) -> None:
        if self.resources.workers is not None:
            if self.runtime.mode != "asynchronous":
                raise ValueError("give runtime.mode or resources.workers, not both: the workers' tags are the mode")
            for workers in self.resources.workers:
                if workers.policy is not None and workers.policy not in self.policies:
                    raise ValueError(f"resources.workers names the policy {workers.policy!r}, which is not there")
            for tag in ("rollout", "train"):
                if not any(tag in workers.tags for workers in self.resources.workers):
                    raise ValueError(f"no worker in resources.workers has the tag {tag}: the run could never get on")
        if self.mode != "asynchronous" and (len(self.policies) > 1 or self.outside):
            raise ValueError(f"a {self.mode} run is for one policy, with workflow or command")
        if self.resources.on_preempt == "move" and (self.mode != "multiplexed" or not self.rollout.engines):
            raise ValueError(
                "resources.on_preempt=move needs a multiplexed run with rollout.engines: there answers can go on"
            )
        if self.mode == "colocated" and self.rollout.engines:
            raise ValueError("a colocated run samples in its trainers: rollout.engines must be 0")
        if self.runtime.mode == "colocated" and self.rollout.nodes > 1:
            raise ValueError("runtime.mode=colocated has a node in each rank: raise trainer.ranks, not rollout.nodes")

    @property
    def mode(self) -> Literal["asynchronous", "colocated", "multiplexed"]:
        """`runtime.mode`, or the mode that the tags of `resources.workers` amount to."""
        if self.resources.workers is None:
            return self.runtime.mode
        kinds = [set(workers.tags) for workers in self.resources.workers]
        if {"rollout", "train"} not in kinds:
            return "asynchronous"
        return "multiplexed" if {"rollout"} in kinds else "colocated"

    def staleness(self, policy: str) -> int:
        """Return the staleness bound of one policy's stream."""
        own = self.policies[policy].staleness
        return self.dataflow.staleness if own is None else own

    @property
    def policy(self) -> str:
        """The name of the first policy: what `episode.model` says."""
        return next(iter(self.policies))

"""The schema of a recipe. Every key has a default or is required; every bound is checked here, once.

A recipe is YAML; `load.load_recipe` turns it into a `Recipe`, or raises a ConfigError that names the key, the mistake
and the nearest valid name. The resolved recipe is written into every run.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.config.base import Name, Section
from rillflow.config.policy import PolicyConfig
from rillflow.config.rollout import (
    CommandConfig,
    DataConfig,
    DataflowConfig,
    GatewayConfig,
    HookConfig,
    RewardConfig,
    RolloutConfig,
    ToolConfig,
)
from rillflow.config.runs import EvaluationConfig, ObserveConfig, ResourcesConfig, RuntimeConfig

# How an episode may end without an answer; the detail is a command's exit code or the name of a workflow's exception.
_END = re.compile(r"agent_error(\.-?\d+)?|workflow_error(\.\w+)?|context_overflow|timeout")


class Recipe(Section):
    """A whole experiment, validated: `load_recipe` makes it, `run` takes it. docs/recipes.md lists its keys.

    Example:

        recipe = rillflow.load_recipe("quickstart")
        print(recipe.name, recipe.seed, list(recipe.policies))
    """

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
        self._check_ledgers()
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

    def _check_ledgers(self) -> None:
        """Refuse what one of several ledgers cannot decide from its own prompts."""
        ledgers = self.dataflow.ledgers
        if ledgers == 1:
            return
        trainer = self.policies[self.policy].trainer
        refused = {
            "several policies": len(self.policies) > 1,
            f"policies.{self.policy}.stages": bool(self.policies[self.policy].stages),
            "dataflow.curators": bool(self.dataflow.curators),
            f"dataflow.sampler={self.dataflow.sampler.name}": self.dataflow.sampler.name != "earliest_deadline",
            "trainer.stream_groups": trainer.stream_groups > 0,
            "runtime.deterministic": self.runtime.deterministic,
            "resources.scaling": self.resources.scaling.enabled,
        }
        if found := [name for name, given in refused.items() if given]:
            raise ValueError(
                f"dataflow.ledgers={ledgers} does not work with {', '.join(found)}: each ledger sees its own prompts "
                "only; leave one of them out"
            )
        if trainer.batch_groups % ledgers:
            raise ValueError(
                f"dataflow.ledgers={ledgers} needs a trainer.batch_groups that it divides, not {trainer.batch_groups}: "
                "every ledger gives the same number of groups to a batch"
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

"""The settings of a recipe that the ledger needs, in one flat immutable value; and how seeds are derived."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rillflow.config import Recipe
from rillflow.errors import ConfigError
from rillflow.types.runs import mark_of, owner_of

_POLICY_FIELDS = ("staleness", "batch_groups", "total_steps", "trains_on", "stages")


@dataclass(frozen=True)
class PolicyRules:
    """The numbers of one policy and its stream. `staleness` is the bound k, `batch_groups` is B."""

    name: str
    staleness: int = 4
    batch_groups: int = 8
    total_steps: int = 100
    trains_on: tuple[str, ...] = ()  # the producers whose samples its stream gets; none: its own
    stages: tuple[str, ...] = ()

    @property
    def producers(self) -> tuple[str, ...]:
        return self.trains_on or (self.name,)

    @property
    def window(self) -> int:
        """Most train groups between admission and end: more could be older than the bound when their turn comes."""
        return (self.staleness + 1) * self.batch_groups

    @property
    def most_ready(self) -> int:
        """Most shares that wait for a trainer that is slower than another's."""
        return 2 * self.window

    @property
    def on_policy(self) -> bool:
        return self.staleness == 0


@dataclass(frozen=True)
class Rules:
    """The numbers that govern one run. The plain numbers of a status are those of the first of `policies`.

    A run may have several `ledgers`; `ledger` is the number of this one. `batch_groups` is then its part of a batch.
    """

    policies: Mapping[str, PolicyRules]
    ledger: int = 0
    ledgers: int = 1
    seed: int = 0
    group_size: int = 8
    grouping: str = "policy"  # the samples that a sample is compared with: see DataflowConfig
    attempts: int = 3
    task_lease: float = 30.0
    batch_lease: float = 300.0
    node_timeout: float = 10.0
    unit_timeout: float = 60.0
    drop_after: float = 600.0  # seconds that an unneeded segment stays: a reader may still use it
    group_deadline: float | None = None
    max_failures: int = 64
    epochs: int | None = None
    evaluate_every: int = 0
    repeats: int = 1
    target: float | None = None  # the held-out reward that ends the run
    balance_every: int = 10
    group_reward: bool = False  # a complete group is rewarded before its statistics are taken: see `group_rewards`
    kept_per_step: int = 0  # trajectories drawn from each step, for people: see `kept_episodes`
    kept_extremes: bool = False  # and whether its best and its worst are kept
    kept_per_evaluation: int = 0

    def __post_init__(self) -> None:
        for policy in self.policies.values():
            if unknown := [name for name in policy.producers if name not in self.policies]:
                raise ConfigError(
                    f"policy {policy.name} trains on {', '.join(unknown)}, which this run does not have",
                    f"its policies are {', '.join(self.policies)}",
                )

    @cached_property
    def policy(self) -> str:
        """The name of the first policy."""
        return next(iter(self.policies))

    @cached_property
    def on_policy(self) -> bool:
        """True if a stream of the run trains on its policies' newest tokens only."""
        return any(policy.on_policy for policy in self.policies.values())

    def streams_of(self, producer: str) -> list[str]:
        """The streams that get what `producer` has sampled."""
        return self._streams_of[producer]

    @cached_property
    def _streams_of(self) -> dict[str, list[str]]:
        policies = self.policies.values()
        return {name: [policy.name for policy in policies if name in policy.producers] for name in self.policies}

    @cached_property
    def mark(self) -> str:
        """The beginning of the names of groups and batches."""
        return mark_of(self.ledger)

    def owns(self, prompt: str) -> bool:
        """Return whether the prompt of this id belongs to this ledger."""
        return owner_of(prompt, self.ledgers) == self.ledger

    @property
    def most_returns(self) -> int:
        """A task whose nodes die is not to blame, until it has taken this many with it."""
        return 4 * self.attempts

    @classmethod
    def single(cls, policy: str, **values: Any) -> Rules:
        """The rules of a run of one policy, whose own numbers may stand among the others."""
        own = {name: values.pop(name) for name in _POLICY_FIELDS if name in values}
        return cls(policies={policy: PolicyRules(policy, **own)}, **values)

    @classmethod
    def of(cls, recipe: Recipe, *, group_reward: bool = False, ledger: int = 0) -> Rules:
        """Return the rules of one ledger. The first one alone evaluates, and keeps trajectories for people."""
        flow, kept = recipe.dataflow, recipe.observe.trajectories
        keeps = kept.max_bytes > 0 and ledger == 0
        return cls(
            policies={name: _policy_rules(recipe, name) for name in recipe.policies},
            ledger=ledger,
            ledgers=flow.ledgers,
            seed=recipe.seed,
            group_size=flow.group_size,
            grouping=flow.grouping,
            attempts=flow.attempts,
            task_lease=flow.task_lease,
            batch_lease=flow.batch_lease,
            node_timeout=flow.node_timeout,
            unit_timeout=flow.units.timeout,
            drop_after=flow.units.drop_after,
            group_deadline=flow.group_deadline,
            max_failures=flow.max_failures,
            epochs=recipe.data.epochs,
            evaluate_every=recipe.evaluation.every,
            repeats=recipe.evaluation.repeats,
            target=recipe.evaluation.target,
            balance_every=flow.balance_every,
            group_reward=group_reward,
            kept_per_step=kept.per_step if keeps and kept.sample else 0,
            kept_extremes=keeps and bool(kept.best or kept.worst),
            kept_per_evaluation=kept.per_evaluation if keeps and kept.evaluation else 0,
        )


def _policy_rules(recipe: Recipe, name: str) -> PolicyRules:
    policy = recipe.policies[name]
    return PolicyRules(
        name,
        staleness=recipe.staleness(name),
        batch_groups=policy.trainer.batch_groups // recipe.dataflow.ledgers,
        total_steps=policy.trainer.steps,
        trains_on=tuple(policy.trains_on or ()),
        stages=tuple(policy.stages),
    )


def derive_seed(*parts: str | int) -> int:
    """53 bits (exact in every language's numbers) from what identifies a thing, the same on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 11

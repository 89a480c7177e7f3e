"""What the ledger needs to know of a recipe, in one flat immutable value; and how seeds are derived."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rillflow.config import Recipe


@dataclass(frozen=True)
class Rules:
    """The numbers that govern one run. `staleness` is the bound k, `batch_groups` is B."""

    policy: str
    seed: int = 0
    group_size: int = 8
    staleness: int = 4
    batch_groups: int = 8
    total_steps: int = 100
    attempts: int = 3
    task_lease: float = 30.0
    batch_lease: float = 300.0
    node_timeout: float = 10.0
    max_failures: int = 64
    epochs: int | None = None
    evaluate_every: int = 0
    repeats: int = 1

    @property
    def window(self) -> int:
        """Most train groups between admission and end: more could be older than the bound when their turn comes."""
        return (self.staleness + 1) * self.batch_groups

    @property
    def on_policy(self) -> bool:
        return self.staleness == 0

    @property
    def most_returns(self) -> int:
        """A task whose nodes die is not to blame, until it has taken this many with it."""
        return 4 * self.attempts

    @classmethod
    def of(cls, recipe: Recipe) -> Rules:
        flow, trainer = recipe.dataflow, recipe.policies[recipe.policy].trainer
        return cls(
            policy=recipe.policy,
            seed=recipe.seed,
            group_size=flow.group_size,
            staleness=flow.staleness,
            batch_groups=trainer.batch_groups,
            total_steps=trainer.steps,
            attempts=flow.attempts,
            task_lease=flow.task_lease,
            batch_lease=flow.batch_lease,
            node_timeout=flow.node_timeout,
            max_failures=flow.max_failures,
            epochs=recipe.data.epochs,
            evaluate_every=recipe.evaluation.every,
            repeats=recipe.evaluation.repeats,
        )


def derive_seed(*parts: str | int) -> int:
    """53 bits (exact in every language's numbers) from what identifies a thing, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 11

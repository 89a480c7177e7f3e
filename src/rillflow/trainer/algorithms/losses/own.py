"""A user's loss: a function of tokens that gives the loss of each, in place of the algorithm's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rillflow.config import resolve_object
from rillflow.errors import ConfigError
from rillflow.trainer.algorithms.common import WholeRows, none_of


@dataclass(frozen=True)
class OwnLoss:
    """`name` is where the recipe says it is."""

    name: str
    run: Callable[[WholeRows], torch.Tensor]

    @classmethod
    def load(cls, name: str) -> OwnLoss:
        run = resolve_object(name)
        if not callable(run):
            raise ConfigError(f"{name} is no function", "trainer.loss is a function: def loss(tokens) -> Tensor")
        return cls(name, run)

    def __call__(self, tokens: WholeRows) -> torch.Tensor:
        loss_T = self.run(tokens)
        if not isinstance(loss_T, torch.Tensor) or loss_T.shape != tokens.new_T.shape:
            shape = tuple(loss_T.shape) if isinstance(loss_T, torch.Tensor) else type(loss_T).__name__
            raise ConfigError(
                f"{self.name} returned {shape} for {len(tokens.new_T)} tokens",
                "return the loss of each token: they are weighted and added up afterwards",
            )
        if tokens.new_T.requires_grad and not loss_T.requires_grad:
            raise ConfigError(
                f"what {self.name} returned has no gradient: nothing could be learnt from it",
                "compute it from tokens.new_T, neither detached nor under torch.no_grad()",
            )
        return loss_T

    def held(self, tokens: WholeRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing is known of what it holds."""
        return none_of(tokens), none_of(tokens)

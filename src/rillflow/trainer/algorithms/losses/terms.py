"""What a recipe puts around any loss, in this order: truncated importance weights between the weights before the first
update and the engine (TIS), a distance from a reference, an entropy bonus.

Under truncation the loss itself is centred on the proximal log-probs, as the oracles do it: what the engine is away
from them is in the weights. The distance and the bonus are aggregated as the loss is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rillflow.config import TrainerConfig
from rillflow.errors import GraphError
from rillflow.trainer.algorithms.common import BatchLoss, Loss, WholeRows
from rillflow.trainer.algorithms.losses.entropy import with_entropy_bonus
from rillflow.trainer.algorithms.losses.kl import KL
from rillflow.trainer.algorithms.losses.truncation import token_weights
from rillflow.trainer.parallel.peers import Alone, Peers


@dataclass(frozen=True)
class Terms:
    """`bound` of the truncated weights; `kl` and `entropy` are factors; `estimator` names one of `losses.kl`."""

    bound: float | None = None
    kl: float = 0.0
    estimator: str = "k3"
    entropy: float = 0.0

    @classmethod
    def of(cls, config: TrainerConfig) -> Terms:
        kl = config.kl if config.kl is not None and config.kl.where == "loss" else None
        return cls(
            bound=config.truncate,
            kl=kl.coefficient if kl is not None else 0.0,
            estimator=kl.estimator if kl is not None else cls.estimator,
            entropy=config.entropy,
        )

    def around(self, loss: Loss | BatchLoss) -> Loss | BatchLoss:
        """The loss as it is where there is nothing to add."""
        if self == Terms():
            return loss
        return TermsBatchLoss(loss, self) if isinstance(loss, BatchLoss) else TermsLoss(loss, self)

    def centred(self, tokens: WholeRows) -> WholeRows:
        """The tokens as the loss inside sees them."""
        if self.bound is None:
            return tokens
        return replace(tokens, old_T=_there(tokens.proximal_T, "proximal_N"))

    def weights(self, tokens: WholeRows) -> torch.Tensor | None:
        if self.bound is None:
            return None
        return token_weights(_there(tokens.proximal_T, "proximal_N"), tokens.old_T, self.bound)

    def distance(self, tokens: WholeRows) -> torch.Tensor | None:
        """Of the estimator, without its factor."""
        return KL[self.estimator](tokens.new_T, _there(tokens.reference_T, "reference_N")) if self.kl else None


@dataclass(frozen=True)
class TermsLoss:
    loss: Loss
    terms: Terms

    def __call__(self, tokens: WholeRows) -> torch.Tensor:
        loss_T = self.loss(self.terms.centred(tokens))
        weight_T, distance_T = self.terms.weights(tokens), self.terms.distance(tokens)
        if weight_T is not None:
            loss_T = loss_T * weight_T
        if distance_T is not None:
            loss_T = loss_T + self.terms.kl * distance_T
        if self.terms.entropy:
            loss_T = with_entropy_bonus(loss_T, _there(tokens.entropy_T, "entropy"), self.terms.entropy)
        return loss_T

    def held(self, tokens: WholeRows) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss.held(self.terms.centred(tokens))


@dataclass(frozen=True)
class TermsBatchLoss:
    loss: BatchLoss
    terms: Terms

    def fit(self, batch: WholeRows, peers: Peers = Alone()) -> tuple[Loss, dict[str, float]]:
        fitted, metrics = self.loss.fit(self.terms.centred(batch), peers)
        return TermsLoss(fitted, self.terms), metrics


def _there(column_T: torch.Tensor | None, name: str) -> torch.Tensor:
    if column_T is None:
        raise GraphError(
            f"the recipe asks for a term of the loss that needs {name}, and no node makes it",
            "add actor_logprobs (truncate) or reference_logprobs (kl) to trainer.graph, or leave the option out",
        )
    return column_T

"""What a recipe adds to any loss: truncated importance weights (TIS), a KL term, an entropy bonus; or its own loss.

The order is fixed: the weights multiply the loss, then the KL term and the bonus are added. With truncation the loss
itself is centred on the proximal log-probs, as in verl and TRL; the engine's distance from them is in the weights. KL
and bonus are aggregated as the loss is (verl's convention; TRL takes the mean of the bonus over tokens, which is the
same under `token_mean`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rillflow.config import TrainerConfig, resolve_object
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.algorithms.common import BatchLoss, Loss, WholeRows, none_of
from rillflow.trainer.algorithms.losses.reinforce import token_weights
from rillflow.trainer.parallel import Alone, Peers

_INPUT_BOUND, _OUTPUT_BOUND = 20.0, 10.0


# ---------------------------------------------------------------- estimators of KL(new || reference)
#
# For tokens that `new` sampled, with x = new - reference. In a loss they keep their gradient; in a reward (the node
# `kl_reward`) they are numbers that are subtracted.


def k1(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Return x: unbiased with high variance. In a loss its gradient does not depend on the distance."""
    return new_T - reference_T


def k2(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Return x^2 / 2: biased, but in a loss its gradient is that of the KL."""
    return 0.5 * (new_T - reference_T).square()


def k3(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Return e^-x + x - 1: unbiased and never negative. Bounded as in verl: x by 20, the result by 10."""
    x_T = (new_T - reference_T).clamp(-_INPUT_BOUND, _INPUT_BOUND)
    return (torch.exp(-x_T) + x_T - 1).clamp(-_OUTPUT_BOUND, _OUTPUT_BOUND)


def k3_unbounded(new_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Return TRL's k3."""
    x_T = new_T - reference_T
    return torch.exp(-x_T) + x_T - 1


KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1, "k2": k2, "k3": k3, "k3_unbounded": k3_unbounded,
}  # fmt: skip


def with_entropy_bonus(loss_T: torch.Tensor, entropy_T: torch.Tensor, factor: float) -> torch.Tensor:
    return loss_T - factor * entropy_T


# ---------------------------------------------------------------- terms around a loss


@dataclass(frozen=True)
class Terms:
    """`bound` limits the truncated weights; `kl` and `entropy` are factors; `estimator` names an entry of `KL`."""

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
        """Return the loss with these terms; without terms, the loss itself."""
        if self == Terms():
            return loss
        return TermsBatchLoss(loss, self) if isinstance(loss, BatchLoss) else TermsLoss(loss, self)

    def centred(self, tokens: WholeRows) -> WholeRows:
        """Return the tokens as the inner loss sees them."""
        if self.bound is None:
            return tokens
        return replace(tokens, old_T=_required(tokens.proximal_T, "proximal_N"))

    def weights(self, tokens: WholeRows) -> torch.Tensor | None:
        if self.bound is None:
            return None
        return token_weights(_required(tokens.proximal_T, "proximal_N"), tokens.old_T, self.bound)

    def distance(self, tokens: WholeRows) -> torch.Tensor | None:
        """Return the estimate of the KL without its factor, None without a KL term."""
        return KL[self.estimator](tokens.new_T, _required(tokens.reference_T, "reference_N")) if self.kl else None


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
            loss_T = with_entropy_bonus(loss_T, _required(tokens.entropy_T, "entropy"), self.terms.entropy)
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


def _required(column_T: torch.Tensor | None, name: str) -> torch.Tensor:
    if column_T is None:
        raise GraphError(
            f"a term of the loss needs {name}, but no node makes it",
            "add actor_logprobs (truncate) or reference_logprobs (kl) to trainer.graph, or leave the option out",
        )
    return column_T


# ---------------------------------------------------------------- a user's loss


@dataclass(frozen=True)
class UserLoss:
    """A user's function, which returns the loss of each token. `name` is its place in the recipe's form."""

    name: str
    run: Callable[[WholeRows], torch.Tensor]

    @classmethod
    def load(cls, name: str) -> UserLoss:
        run = resolve_object(name)
        if not callable(run):
            raise ConfigError(f"{name} is not a function", "trainer.loss is a function: def loss(tokens) -> Tensor")
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
                f"the loss that {self.name} returned has no gradient: the policy could not learn from it",
                "compute it from tokens.new_T, neither detached nor under torch.no_grad()",
            )
        return loss_T

    def held(self, tokens: WholeRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return no tokens: the function's trust region is unknown."""
        return none_of(tokens), none_of(tokens)

"""Functions that train: the actor on its advantages, the critic on the returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import numpy as np
import torch

from rillflow.config import CriticConfig, TrainerConfig
from rillflow.errors import GraphError
from rillflow.trainer.algorithms import Algorithm
from rillflow.trainer.algorithms.common import BatchLoss, Loss, WholeRows, ratio
from rillflow.trainer.algorithms.losses.clip import value_loss
from rillflow.trainer.algorithms.losses.terms import Terms
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.graph.worker import Parts, Step
from rillflow.trainer.learner import Learner, Measured, Objective, Seen
from rillflow.trainer.metrics import Consistency, KeptValues
from rillflow.trainer.packing import MicroBatch
from rillflow.trainer.parallel import Peers

_SUMS = ("clip_low", "clip_high", "approx_kl", "ratio", "ratio_square", "entropy", "advantage", "advantage_square")
_CRITIC_NAMES = {"loss": "value_loss", "grad_norm": "critic_grad_norm", "lr": "critic_lr", "skipped": "critic_skipped"}


def learner_of(step: Step, role: str) -> Learner:
    """Return the learner of a role; GraphError if the step has none that trains."""
    found = step.models.get(role)
    if not isinstance(found, Learner) or found.optimizer is None:
        raise GraphError(f"the step has no {role} that can be trained", "only an actor, a critic or a reward model can")
    return found


# ---------------------------------------------------------------- the actor


class PolicyObjective(Objective):
    """An algorithm's loss of the trained tokens, weighted and counted by its aggregation."""

    peaks = ("ratio_max",)

    def __init__(
        self,
        algorithm: Algorithm,
        config: TrainerConfig,
        consistency: Consistency | None = None,
        kept: KeptValues | None = None,
    ) -> None:
        """`consistency` gets the tokens of the first update, whose weights are those of the trainer's version; `kept`
        gets every token once."""
        self._algorithm = algorithm
        self._config = config
        self._consistency = consistency
        self._kept = kept
        self._terms = Terms.of(config)
        self.surveys = isinstance(algorithm.loss, BatchLoss)
        distance = ("kl",) if config.kl is not None else ()
        truncation = ("tis", "tis_truncated") if config.truncate is not None else ()
        self.sums = (*_SUMS, *distance, *truncation)

    def prepare(self, data: Databuffer) -> Databuffer:
        weight_R = self._algorithm.aggregation.weigh(data.rows.trained_R)
        return data.adding({"weight_N": weight_R[data.row_N]})

    def columns(self, data: Databuffer) -> list[str]:
        return [*super().columns(data), "fresh_N"]

    def count(self, data: Databuffer) -> float:
        return float(self._algorithm.aggregation.count(data.rows.trained_R))

    def fit(self, seen: Sequence[Seen], device: torch.device, peers: Peers) -> tuple[Objective, dict[str, float]]:
        loss = self._algorithm.loss
        assert isinstance(loss, BatchLoss), "only such a loss surveys"
        batch = joined_tokens([tokens_of(micro, new_T) for micro, new_T in seen], device)
        fitted, metrics = loss.fit(batch, peers)
        algorithm = replace(self._algorithm, loss=fitted)
        return PolicyObjective(algorithm, self._config, self._consistency, self._kept), metrics

    def later(self, *, again: bool) -> Objective:
        """Return the objective without comparison of engine and trainer: the weights are not those that sampled."""
        return PolicyObjective(self._algorithm, self._config, kept=None if again else self._kept)

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return (self._of_tokens(tokens_of(micro, score_T, entropy_T)) * micro.columns["weight_T"]).sum()

    @property
    def _of_tokens(self) -> Loss:
        loss = self._algorithm.loss
        assert not isinstance(loss, BatchLoss), "the loss must be fitted first"
        return loss

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        tokens = tokens_of(micro, score_T, entropy_T)
        if self._consistency is not None:
            self._consistency.add(tokens.new_T, tokens.old_T, micro.columns["fresh_T"])
        if self._kept is not None:
            self._kept.add(micro, tokens.advantage_T, tokens.new_T)
        ratio_T = ratio(tokens.new_T, tokens.old_T)
        low_T, high_T = self._of_tokens.held(tokens)
        sums = [
            low_T,
            high_T,
            # The k3 estimator of KL(old || new) on tokens that `old` sampled: r - 1 - log r.
            ratio_T - 1 - (tokens.new_T - tokens.old_T),
            ratio_T,
            ratio_T.double().square(),
            torch.zeros_like(ratio_T) if entropy_T is None else entropy_T,
            tokens.advantage_T,
            tokens.advantage_T.double().square(),
        ]
        weight_T = self._terms.weights(tokens)
        if self._config.kl is not None:
            sums.append(self._distance(tokens))
        if weight_T is not None and self._config.truncate is not None:
            sums += [weight_T, weight_T >= self._config.truncate]
        return [value_T.sum() for value_T in sums], [ratio_T.max()]

    def _distance(self, tokens: WholeRows) -> torch.Tensor:
        """Return the distance from the reference, whether the recipe has it in the loss or in the reward."""
        assert self._config.kl is not None, "the recipe has a reference"
        distance_T = self._terms.distance(tokens)
        if distance_T is not None:
            return distance_T
        return tokens.more.get("kl_T", torch.zeros_like(tokens.new_T)) / self._config.kl.coefficient

    def values(self, sums: dict[str, float], peaks: dict[str, float], tokens: int) -> dict[str, float]:
        """Return means over the trained tokens. ESS is the fraction of them that the ratios leave effective."""
        count = max(tokens, 1)
        mean = {name: value / count for name, value in sums.items()}
        square = mean.pop("ratio_square")
        advantage = mean.pop("advantage")
        spread = sqrt(max(mean.pop("advantage_square") - advantage * advantage, 0.0))
        ratios = mean.pop("ratio")
        ess = ratios * ratios / square if square else 0.0
        return mean | {"ratio_mean": ratios, "ess": ess, "advantage_mean": advantage, "advantage_std": spread} | peaks


def train_actor(step: Step, parts: Parts) -> Mapping[str, float]:
    """Train the actor; during the critic's warm-up, only consume the parts."""
    critic = step.config.critic or CriticConfig()
    if step.algorithm.advantage is None and step.number < critic.warmup_batches:
        for _ in parts:
            step.check()
        return {}
    consistency = Consistency()
    objective = PolicyObjective(step.algorithm, step.config, consistency, step.kept)
    metrics = learner_of(step, "actor").train(parts, objective, step.check, order=step.order)
    seconds = metrics.pop("train_seconds")
    metrics |= {"tokens_per_second": step.metrics.get("tokens", 0.0) / seconds if seconds else 0.0}
    return metrics | consistency.values(step.peers)


def tokens_of(micro: MicroBatch, new_T: torch.Tensor, entropy_T: torch.Tensor | None = None) -> WholeRows:
    """Return a micro-batch as a loss sees it. Without a node that makes advantages they are 0."""
    columns = micro.columns
    return WholeRows(
        new_T,
        columns["old_T"],
        columns.get("advantage_T", torch.zeros_like(columns["old_T"])),
        micro.row_T,
        micro.rows,
        proximal_T=columns.get("proximal_T"),
        reference_T=columns.get("reference_T"),
        entropy_T=entropy_T,
        more=columns,
    )


def joined_tokens(parts: Sequence[WholeRows], device: torch.device) -> WholeRows:
    """Join the parts of a batch, for losses that must see all of it; rows are renumbered. `more` is left out."""
    nothing = torch.zeros(0, device=device)
    if not parts:
        return WholeRows(nothing, nothing, nothing, nothing.long(), 0, proximal_T=nothing, reference_T=nothing)
    first = np.cumsum([0, *(part.rows for part in parts)]).tolist()

    def column(name: str) -> torch.Tensor | None:
        of_parts = [getattr(part, name) for part in parts]
        return None if of_parts[0] is None else torch.cat(of_parts)

    return WholeRows(
        torch.cat([part.new_T for part in parts]),
        torch.cat([part.old_T for part in parts]),
        torch.cat([part.advantage_T for part in parts]),
        torch.cat([part.row_T + before for part, before in zip(parts, first[:-1], strict=True)]),
        first[-1],
        proximal_T=column("proximal_T"),
        reference_T=column("reference_T"),
    )


# ---------------------------------------------------------------- the critic


class ValueObjective(Objective):
    """Half the squared error of values, averaged over tokens. `bound` limits a value's move since the advantages."""

    sums = ("value", "return", "return_square", "error", "error_square", "clipped")

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def columns(self, data: Databuffer) -> list[str]:
        return ["value_N", "return_N"]

    def count(self, data: Databuffer) -> float:
        return float(data["mask_N"].sum())

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return value_loss(score_T, micro.columns["value_T"], micro.columns["return_T"], self._bound).sum()

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        value_T, return_T = micro.columns["value_T"].double(), micro.columns["return_T"].double()
        error_T = return_T - value_T
        moved_T = (score_T.double() - value_T).clamp(-self._bound, self._bound) + value_T
        clipped_T = (moved_T - return_T).square() > (score_T.double() - return_T).square()
        of = (value_T, return_T, return_T.square(), error_T, error_T.square(), clipped_T)
        return [each_T.sum() for each_T in of], []

    def values(self, sums: dict[str, float], peaks: dict[str, float], tokens: int) -> dict[str, float]:
        """Return metrics. `explained_variance` is that of the returns by the values before the update: 1 is all of
        it."""
        mean = {name: value / max(tokens, 1) for name, value in sums.items()}
        of_returns = mean["return_square"] - mean["return"] ** 2
        of_errors = mean["error_square"] - mean["error"] ** 2
        explained = 1.0 - of_errors / of_returns if of_returns > 0 else 0.0
        return {
            "value_mean": mean["value"],
            "return_mean": mean["return"],
            "explained_variance": explained,
            "value_clip": mean["clipped"],
        }


def train_critic(step: Step, parts: Parts) -> Mapping[str, float]:
    critic = step.config.critic or CriticConfig()
    objective = ValueObjective(critic.value_clip)
    metrics = learner_of(step, "critic").train(parts, objective, step.check, order=step.order)
    shared = ("trained_tokens", "updates", "train_seconds", "mfu")
    return {_CRITIC_NAMES.get(name, name): value for name, value in metrics.items() if name not in shared}

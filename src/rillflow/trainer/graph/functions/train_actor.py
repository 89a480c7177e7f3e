"""The actor learns: the algorithm's loss on the advantages that the nodes before it have made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch

from rillflow.config import CriticConfig, TrainerConfig
from rillflow.trainer.algorithms import Algorithm
from rillflow.trainer.algorithms.common import BatchLoss, Loss, WholeRows, ratio
from rillflow.trainer.algorithms.losses.terms import Terms
from rillflow.trainer.consistency import Consistency
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.functions.learners import learner_of
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Parts, Step
from rillflow.trainer.kept import Told
from rillflow.trainer.layout import MicroBatch
from rillflow.trainer.objective import Measured, Objective, Seen
from rillflow.trainer.parallel.peers import Peers
from rillflow.trainer.whole import joined, of_micro

_SUMS = ("clip_low", "clip_high", "approx_kl", "ratio", "ratio_square", "entropy", "advantage", "advantage_square")


class PolicyObjective(Objective):
    """An algorithm's loss of the trained tokens, weighted and counted as its aggregation says."""

    peaks = ("ratio_max",)

    def __init__(
        self,
        algorithm: Algorithm,
        config: TrainerConfig,
        consistency: Consistency | None = None,
        told: Told | None = None,
    ) -> None:
        """`consistency` hears of the tokens of the first update, whose weights are those of the trainer's version;
        `told` of every token once."""
        self._algorithm = algorithm
        self._config = config
        self._consistency = consistency
        self._told = told
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
        batch = joined([of_micro(micro, new_T) for micro, new_T in seen], device)
        fitted, metrics = loss.fit(batch, peers)
        algorithm = replace(self._algorithm, loss=fitted)
        return PolicyObjective(algorithm, self._config, self._consistency, self._told), metrics

    def later(self, *, again: bool) -> Objective:
        """Its weights are not those that sampled, so engine and trainer are not compared. Of each row is told once."""
        return PolicyObjective(self._algorithm, self._config, told=None if again else self._told)

    def loss(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> torch.Tensor:
        return (self._of_tokens(of_micro(micro, score_T, entropy_T)) * micro.columns["weight_T"]).sum()

    @property
    def _of_tokens(self) -> Loss:
        loss = self._algorithm.loss
        assert not isinstance(loss, BatchLoss), "it must be fitted first"
        return loss

    def measure(self, micro: MicroBatch, score_T: torch.Tensor, entropy_T: torch.Tensor | None) -> Measured:
        tokens = of_micro(micro, score_T, entropy_T)
        if self._consistency is not None:
            self._consistency.add(tokens.new_T, tokens.old_T, micro.columns["fresh_T"])
        if self._told is not None:
            self._told.add(micro, tokens.advantage_T, tokens.new_T)
        ratio_T = ratio(tokens.new_T, tokens.old_T)
        low_T, high_T = self._of_tokens.held(tokens)
        sums = [
            low_T,
            high_T,
            # k3 estimator of KL(old || new) on tokens that old has sampled: r - 1 - log r.
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
        """From the reference, wherever the recipe has put it."""
        assert self._config.kl is not None, "there is a reference"
        distance_T = self._terms.distance(tokens)
        if distance_T is not None:
            return distance_T
        return tokens.more.get("kl_T", torch.zeros_like(tokens.new_T)) / self._config.kl.coefficient

    def values(self, sums: dict[str, float], peaks: dict[str, float], tokens: int) -> dict[str, float]:
        """Means over the trained tokens; ESS is the fraction of them that the ratios leave effective."""
        count = max(tokens, 1)
        mean = {name: value / count for name, value in sums.items()}
        square = mean.pop("ratio_square")
        advantage = mean.pop("advantage")
        spread = sqrt(max(mean.pop("advantage_square") - advantage * advantage, 0.0))
        ratios = mean.pop("ratio")
        ess = ratios * ratios / square if square else 0.0
        return mean | {"ratio_mean": ratios, "ess": ess, "advantage_mean": advantage, "advantage_std": spread} | peaks


def train_actor(step: Step, parts: Parts) -> Mapping[str, float]:
    """Nothing is learnt while the critic warms up."""
    critic = step.config.critic or CriticConfig()
    if step.algorithm.advantage is None and step.number < critic.warmup_batches:
        for _ in parts:
            step.check()
        return {}
    consistency = Consistency()
    objective = PolicyObjective(step.algorithm, step.config, consistency, step.told)
    metrics = learner_of(step, "actor").train(parts, objective, step.check, order=step.order)
    seconds = metrics.pop("train_seconds")
    metrics |= {"tokens_per_second": step.metrics.get("tokens", 0.0) / seconds if seconds else 0.0}
    return metrics | consistency.values(step.peers)


REGISTRY.add(
    Function(
        "train_actor",
        "actor",
        "train",
        train_actor,
        ("advantage_N", "old_N", "mask_N", "member_R", "proximal_N?", "reference_N?"),
        default=True,
    )
)

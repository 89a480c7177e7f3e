"""The algorithms that a recipe can name, as one table of compositions.

An algorithm is an advantage (`advantages`), a loss of tokens (`losses`, one file for each formula) and an aggregation
of token losses into the loss of a batch (`common`). The table holds each algorithm's defaults; a recipe may replace any
part (`trainer.advantage`, `trainer.loss`, `trainer.aggregation`) and any bound (`clip_low`, `clip_high`, …). A new
algorithm is one entry, and one file if it has a formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.algorithms.advantages import (
    CONVENTIONS,
    Convention,
    Groups,
    centred,
    leave_one_out,
    normalised,
    standardise,
    whiten,
)
from rillflow.trainer.algorithms.common import (
    Aggregation,
    Algorithm,
    BatchLoss,
    Loss,
    counting_idle,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from rillflow.trainer.algorithms.losses.cispo import CispoLoss
from rillflow.trainer.algorithms.losses.clip import Clip, ClippedLoss
from rillflow.trainer.algorithms.losses.decoupled import DecoupledLoss
from rillflow.trainer.algorithms.losses.gspo import RowClippedLoss
from rillflow.trainer.algorithms.losses.m2po import M2poClip, M2poMask
from rillflow.trainer.algorithms.losses.reinforce import ReinforceLoss
from rillflow.trainer.algorithms.losses.sapo import SapoLoss
from rillflow.trainer.algorithms.losses.terms import Terms, UserLoss

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats, Rows

    AdvantageOfRows = Callable[[Floats, Groups, Convention], Floats]

__all__ = ["ADVANTAGES", "ALGORITHMS", "Algorithm", "convention_of"]

LossOf = Callable[[TrainerConfig], Loss | BatchLoss]


@dataclass(frozen=True)
class Composition:
    """The default parts of an algorithm. Without an advantage of groups, a critic makes the advantages (GAE)."""

    advantage: str | None
    loss: LossOf
    aggregation: str

    def __call__(self, config: TrainerConfig) -> Algorithm:
        """Build the algorithm, with the recipe's parts in place of the defaults."""
        name = config.advantage or self.advantage
        loss = UserLoss.load(config.loss) if config.loss is not None else self.loss(config)
        whitening = standardise if config.convention == "astraflow" else whiten
        return Algorithm(
            loss=Terms.of(config).around(loss),
            advantage=None if name is None else _advantage_of_rows(ADVANTAGES[name], convention_of(config)),
            aggregation=_aggregation(config, config.aggregation or self.aggregation),
            whiten=whitening if name is None or name in _WHITENED else None,
            to_go=name == "reinforce_plus_plus",
        )


# ---------------------------------------------------------------- losses with their default bounds


def _clip(low: float, high: float, dual: float | None = None) -> LossOf:
    return lambda config: ClippedLoss(_bounds(config, low, high, dual))


def _row_clip(low: float, high: float) -> LossOf:
    return lambda config: RowClippedLoss(_bounds(config, low, high))


def _decoupled(low: float, high: float, cap: float) -> LossOf:
    return lambda config: DecoupledLoss(_bounds(config, low, high), config.weight_bound or cap)


def _sapo(positive: float, negative: float) -> LossOf:
    return lambda config: SapoLoss(*(config.sapo_tau or (positive, negative)))


def _reinforce(bound: float) -> LossOf:
    return lambda config: ReinforceLoss(config.weight_bound or bound, config.weight_level or "token")


def _cispo(config: TrainerConfig) -> Loss:
    """verl bounds the ratio by [1 - low, 1 + high], TRL by an absolute upper bound alone."""
    if config.convention == "trl":
        return CispoLoss.trl(config.clip_high or 5.0)
    return CispoLoss.verl(config.clip_low or 1.0, config.clip_high or 0.2)


def _m2po(config: TrainerConfig) -> BatchLoss:
    """The variant `mask` (AReaL) keeps a fixed clip and drops the tokens that drifted most."""
    threshold = config.m2_threshold or 0.01
    if config.m2_variant == "mask":
        return M2poMask(threshold, _bounds(config, 0.2, 0.2))
    return M2poClip(threshold, _dual(config))


def _ppo(config: TrainerConfig) -> Loss | BatchLoss:
    """A critic makes PPO's advantages, so a recipe cannot choose others."""
    if config.advantage is not None:
        raise ConfigError(
            f"ppo takes its advantages from its critic, not from {config.advantage}",
            "leave trainer.advantage out, or use algorithm: grpo, which has ppo's loss without a critic",
        )
    if config.step_rewards == "own":
        raise ConfigError("with a critic the rewards of answers add up along a row", "set trainer.step_rewards: to_go")
    return _clip(0.2, 0.2, 3.0)(config)


def _bounds(config: TrainerConfig, low: float, high: float, dual: float | None = None) -> Clip:
    """Return the recipe's clip bounds, or the algorithm's defaults."""
    return Clip(config.clip_low or low, config.clip_high or high, _dual(config, dual))


def _dual(config: TrainerConfig, default: float | None = None) -> float | None:
    """Return the bound for negative advantages. TRL's losses have none."""
    if config.clip_dual == "off" or (config.clip_dual is None and config.convention == "trl"):
        return None
    return config.clip_dual or default


# ---------------------------------------------------------------- the table

# DAPO's other parts act elsewhere: dynamic sampling is a filter of the dataflow layer, the overlong filter and the soft
# punishment are nodes before the advantages. Dr.GRPO divides by a fixed length, so neither easy groups nor long answers
# change the scale. Decoupled PPO clips around the weights before the batch's first update, so only later updates
# (`updates`, `epochs`) reach the clip. PPO's critic learns the returns under its own clip (`losses.clip.value_loss`).
ALGORITHMS: dict[str, Composition] = {
    #                          advantage       loss with its bounds        aggregation
    "grpo": Composition("grpo", _clip(0.2, 0.2, 3.0), "seq_mean_token_mean"),
    "dr_grpo": Composition("dr_grpo", _clip(0.2, 0.2, 3.0), "seq_mean_token_sum_norm"),
    "dapo": Composition("grpo", _clip(0.2, 0.28, 10.0), "token_mean"),
    "gspo": Composition("grpo", _row_clip(3e-4, 4e-4), "seq_mean_token_mean"),
    "cispo": Composition("grpo", _cispo, "token_mean"),
    "sapo": Composition("grpo", _sapo(1.0, 1.05), "seq_mean_token_mean"),
    "m2po": Composition("grpo", _m2po, "token_mean"),
    "rloo": Composition("rloo", _clip(0.2, 0.2, 3.0), "token_mean"),
    "reinforce_plus_plus": Composition("reinforce_plus_plus", _clip(0.2, 0.2, 3.0), "token_mean"),
    "reinforce_plus_plus_baseline": Composition("reinforce_plus_plus_baseline", _clip(0.2, 0.2, 3.0), "token_mean"),
    "reinforce": Composition("rloo", _reinforce(2.0), "seq_mean_token_sum"),
    "decoupled_ppo": Composition("grpo", _decoupled(0.2, 0.2, 5.0), "token_mean"),
    "ppo": Composition(None, _ppo, "token_mean"),
}


# ---------------------------------------------------------------- parts by their names


def _score_itself(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """REINFORCE++: the return itself. With gamma 1 it is the same at every token of a row."""
    return score_R


ADVANTAGES: dict[str, AdvantageOfRows] = {
    "grpo": normalised,
    "grpo_whitened": normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "reinforce_plus_plus": _score_itself,
    "reinforce_plus_plus_baseline": centred,
}
_WHITENED = ("grpo_whitened", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
}


def _advantage_of_rows(compute: AdvantageOfRows, convention: Convention) -> Callable[[Rows], Floats]:
    return lambda rows: compute(rows.reward_R, Groups.of_rows(rows), convention)


def _aggregation(config: TrainerConfig, name: str) -> Aggregation:
    if name == "seq_mean_token_sum_norm":
        assert config.norm_tokens is not None, "the config requires it"
        aggregation = seq_mean_token_sum_norm(config.norm_tokens)
    else:
        aggregation = _AGGREGATIONS[name]
    return counting_idle(aggregation) if config.convention == "trl" else aggregation


def convention_of(config: TrainerConfig) -> Convention:
    """Return the recipe's convention for groups, with its choice for rows that are alone in their group."""
    return replace(CONVENTIONS[config.convention], lone_keeps=config.lone_rows == "reward")

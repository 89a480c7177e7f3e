"""The parts that a recipe may name, and how an algorithm is put together from its own and those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rillflow.config import TrainerConfig
from rillflow.trainer.algorithms.advantages.groups import (
    CONVENTIONS,
    Convention,
    Groups,
    centred,
    leave_one_out,
    normalised,
)
from rillflow.trainer.algorithms.advantages.whitening import standardise, whiten
from rillflow.trainer.algorithms.aggregation import (
    Aggregation,
    counting_idle,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from rillflow.trainer.algorithms.common import Algorithm, BatchLoss, Loss
from rillflow.trainer.algorithms.losses.clip import Clip
from rillflow.trainer.algorithms.losses.own import OwnLoss
from rillflow.trainer.algorithms.losses.terms import Terms
from rillflow.trainer.batches import Rows

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats


def _as_is(score_R: Floats, groups: Groups, convention: Convention) -> Floats:
    """REINFORCE++: the return itself. With gamma 1 it is the same at every token of a row."""
    return score_R


ADVANTAGES: dict[str, Callable[[Floats, Groups, Convention], Floats]] = {
    "grpo": normalised,
    "grpo_whitened": normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "reinforce_plus_plus": _as_is,
    "reinforce_plus_plus_baseline": centred,
}
_WHITENED = ("grpo_whitened", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
}


def assemble(config: TrainerConfig, loss: Loss | BatchLoss, *, advantage: str | None, aggregation: str) -> Algorithm:
    """`loss`, `advantage` and `aggregation` are the algorithm's own; those that the recipe names win.

    Without an advantage there is a critic, whose advantages are whitened.
    """
    name = config.advantage or advantage
    whitening = standardise if config.convention == "astraflow" else whiten
    own = OwnLoss.load(config.loss) if config.loss is not None else loss
    return Algorithm(
        loss=Terms.of(config).around(own),
        advantage=_of_rows(ADVANTAGES[name], convention_of(config)) if name is not None else None,
        aggregation=_aggregation(config, config.aggregation or aggregation),
        whiten=whitening if name is None or name in _WHITENED else None,
        to_go=name == "reinforce_plus_plus",
    )


def _of_rows(of: Callable[[Floats, Groups, Convention], Floats], convention: Convention) -> Callable[[Rows], Floats]:
    return lambda rows: of(rows.reward_R, Groups.of_rows(rows), convention)


def _aggregation(config: TrainerConfig, name: str) -> Aggregation:
    if name == "seq_mean_token_sum_norm":
        assert config.norm_tokens is not None, "the config requires it"
        aggregation = seq_mean_token_sum_norm(config.norm_tokens)
    else:
        aggregation = _AGGREGATIONS[name]
    return counting_idle(aggregation) if config.convention == "trl" else aggregation


def own_clip(config: TrainerConfig, low: float, high: float, dual: float | None = None) -> Clip:
    """The algorithm's own bounds, unless the recipe gives others."""
    return Clip(config.clip_low or low, config.clip_high or high, dual_of(config, dual))


def dual_of(config: TrainerConfig, own: float | None = None) -> float | None:
    """The bound for negative advantages: the recipe's, else the algorithm's own. TRL's losses have none."""
    if config.clip_dual == "off" or (config.clip_dual is None and config.convention == "trl"):
        return None
    return config.clip_dual or own


def convention_of(config: TrainerConfig) -> Convention:
    return replace(CONVENTIONS[config.convention], lone_keeps=config.lone_rows == "reward")

"""Functions that make advantages, from rewards and the statistics of groups or from a critic's values.

`advantages` looks at each row alone, so parts are trained on as they arrive. `batch_advantages` sees all rows of all
ranks: it whitens, compares the rewards of single answers, or subtracts the distance from a reference before rewards are
compared. `gae` uses a critic's values and makes the returns that the critic learns.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rillflow.config import CriticConfig, TrainerConfig
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.algorithms import ALGORITHMS, convention_of
from rillflow.trainer.algorithms import advantages as formulas
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.graph.functions.rows import compared, rows_of, spread, statistics_columns, trained
from rillflow.trainer.graph.worker import Step

if TYPE_CHECKING:
    from rillflow.trainer.batches import Column, Floats

log = logging.getLogger(__name__)


def advantage_function(config: TrainerConfig) -> str:
    """Return the name of the function that makes the advantages of a recipe's algorithm."""
    algorithm = ALGORITHMS[config.algorithm](config)
    if algorithm.advantage is None:
        return "gae"
    priced = config.kl is not None and config.kl.where == "reward"
    if priced and config.by_steps:
        raise ConfigError(
            "rewards of single answers are compared with each other, so they cannot include a KL distance",
            "set kl.where: loss, or leave trainer.step_rewards out",
        )
    whole = priced or algorithm.whiten is not None or config.by_steps
    return "batch_advantages" if whole else "advantages"


def advantages(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Give all tokens of a row the row's advantage."""
    return {"advantage_N": _of_rows(step, data)[data.row_N]}


def batch_advantages(step: Step, data: Databuffer) -> Mapping[str, Column]:
    if step.config.by_steps:
        value_T = _of_answers(step, data)
    elif "kl_N" in data and step.algorithm.to_go:
        row_T = rows_of(data)
        reward_T = formulas.outcome_rewards(data["reward_R"], row_T) - trained(data, "kl_N")
        value_T = formulas.returns_to_go(reward_T, row_T)
    elif "kl_N" in data:
        value_T = _of_rows(step, _with_kl_paid(step, data))[rows_of(data)]
    else:
        value_T = _of_rows(step, data)[rows_of(data)]
    if step.algorithm.whiten is not None:
        value_T = step.algorithm.whiten(value_T, peers=step.peers)
    return {"advantage_N": spread(data, value_T)}


def _of_rows(step: Step, data: Databuffer) -> Floats:
    if step.algorithm.advantage is None:
        raise GraphError(f"{step.config.algorithm} has no advantages of groups", "use the function gae instead")
    return step.algorithm.advantage(data.rows)


def _of_answers(step: Step, data: Databuffer) -> Floats:
    """Return advantages from rewards of single answers. `compared` finds the group of each row."""
    reward_T = trained(data, "step_reward_N")
    (rewarded,) = step.peers.total([float((~np.isnan(reward_T)).sum())])
    if not rewarded:
        log.warning("no answer of this batch has a reward of its own: the policy learns nothing from it")
    step.metrics["rewarded_answers"] = rewarded
    return formulas.step_advantages(
        reward_T,
        rows_of(data),
        np.arange(len(data)),
        convention_of(step.config),
        to_go=step.config.step_rewards == "to_go",
        compare=lambda score, row: compared(data, score, row, step.peers),
    )


def _with_kl_paid(step: Step, data: Databuffer) -> Databuffer:
    """Subtract the distance of all its tokens from a row's reward, and compare rows again (verl's convention)."""
    paid_R = np.bincount(data.row_N, data["kl_N"], minlength=len(data)).astype(np.float64)
    reward_R = data["reward_R"] - paid_R
    groups = compared(data, reward_R, np.arange(len(data)), step.peers)
    return data.adding({"reward_R": reward_R}).adding(statistics_columns(groups))


# ---------------------------------------------------------------- with a critic


def gae(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Make generalised advantages, whitened over the batch, and returns.

    The reward of a row is on its last trained token, or the rewards of its answers on theirs. If the recipe puts the
    KL distance into the reward, each token pays for its own. Tokens that are not trained (the words of a tool) are
    skipped.
    """
    critic = step.config.critic or CriticConfig()
    row_T = rows_of(data)
    value_T, return_T = formulas.gae(
        _token_rewards(step, data), trained(data, "value_N"), row_T, critic.gamma, critic.lam
    )
    if step.algorithm.whiten is not None:
        value_T = step.algorithm.whiten(value_T, peers=step.peers)
    return {"advantage_N": spread(data, value_T), "return_N": spread(data, return_T)}


def _token_rewards(step: Step, data: Databuffer) -> Floats:
    if step.config.by_steps:
        reward_T: Floats = np.nan_to_num(trained(data, "step_reward_N"), nan=0.0)
    else:
        reward_T = formulas.outcome_rewards(data["reward_R"], rows_of(data))
    return reward_T - trained(data, "kl_N") if "kl_N" in data else reward_T

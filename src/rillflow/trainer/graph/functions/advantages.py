"""Advantages from rewards and the statistics of groups.

`advantages` looks at each row for itself, so that parts are trained on as they come. `batch_advantages` sees all rows
of all ranks: to whiten, to compare the rewards of single answers, or to take the distance from a reference off rewards
before they are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.algorithms import ALGORITHMS
from rillflow.trainer.algorithms.advantages.process import step_advantages
from rillflow.trainer.algorithms.advantages.returns import outcome_rewards, returns_to_go
from rillflow.trainer.algorithms.parts import convention_of
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.functions.columns import compared, rows_of, spread, trained
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Step

if TYPE_CHECKING:
    from rillflow.trainer.batches import Floats
    from rillflow.trainer.graph.databuffer import Column

log = logging.getLogger(__name__)


def chosen(config: TrainerConfig) -> str:
    """The function that makes the advantages of a recipe's algorithm."""
    algorithm = ALGORITHMS[config.algorithm](config)
    if algorithm.advantage is None:
        return "gae"
    priced = config.kl is not None and config.kl.where == "reward"
    if priced and config.by_steps:
        raise ConfigError(
            "rewards of single answers are compared with each other, which leaves no place for a distance in them",
            "give kl.where: loss, or leave trainer.step_rewards out",
        )
    whole = priced or algorithm.whiten is not None or config.by_steps
    return "batch_advantages" if whole else "advantages"


def advantages(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """One for each row, on all its tokens."""
    return {"advantage_N": _of_rows(step, data)[data.row_N]}


def batch_advantages(step: Step, data: Databuffer) -> Mapping[str, Column]:
    if step.config.by_steps:
        value_T = _of_answers(step, data)
    elif "kl_N" in data and step.algorithm.to_go:
        row_T = rows_of(data)
        value_T = returns_to_go(outcome_rewards(data["reward_R"], row_T) - trained(data, "kl_N"), row_T)
    elif "kl_N" in data:
        value_T = _of_rows(step, _priced(step, data))[rows_of(data)]
    else:
        value_T = _of_rows(step, data)[rows_of(data)]
    if step.algorithm.whiten is not None:
        value_T = step.algorithm.whiten(value_T, peers=step.peers)
    return {"advantage_N": spread(data, value_T)}


def _of_rows(step: Step, data: Databuffer) -> Floats:
    if step.algorithm.advantage is None:
        raise GraphError(f"{step.config.algorithm} has no advantages of groups", "take the function gae instead")
    return step.algorithm.advantage(data.rows)


def _of_answers(step: Step, data: Databuffer) -> Floats:
    """A row is its own group here: what it is compared with, `compared` knows."""
    reward_T = trained(data, "step_reward_N")
    (rewarded,) = step.peers.total([float((~np.isnan(reward_T)).sum())])
    if not rewarded:
        log.warning("no answer of this batch has a reward of its own: nothing is learnt from it")
    step.metrics["rewarded_answers"] = rewarded
    return step_advantages(
        reward_T,
        rows_of(data),
        np.arange(len(data)),
        convention_of(step.config),
        to_go=step.config.step_rewards == "to_go",
        compare=lambda score, row: compared(data, score, row, step.peers),
    )


def _priced(step: Step, data: Databuffer) -> Databuffer:
    """With the distance of all its tokens taken off a row's reward, and rows compared anew (verl's convention)."""
    paid_R = np.bincount(data.row_N, data["kl_N"], minlength=len(data)).astype(np.float64)
    reward_R = data["reward_R"] - paid_R
    priced = data.adding({"reward_R": reward_R})
    groups = compared(data, reward_R, np.arange(len(data)), step.peers)
    return priced.adding({"group_mean_R": groups.mean_R, "group_std_R": groups.std_R, "group_size_R": groups.size_R})


_NEEDS = ("reward_R", "group_mean_R", "group_std_R", "group_size_R")
REGISTRY.add(Function("advantages", "actor", "compute", advantages, _NEEDS, ("advantage_N",), default=True))
REGISTRY.add(
    Function(
        "batch_advantages",
        "actor",
        "compute",
        batch_advantages,
        (*_NEEDS, "mask_N", "member_R", "alike_R", "step_reward_N", "kl_N?"),
        ("advantage_N",),
        scope="batch",
    )
)

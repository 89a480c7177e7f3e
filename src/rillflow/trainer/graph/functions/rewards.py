"""What a reward is before it becomes an advantage: the score of a reward model, a punishment for length, a distance
from the reference, and the statistics of groups whose rewards a node has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.errors import GraphError
from rillflow.trainer.algorithms.advantages.shaping import soft_overlong
from rillflow.trainer.algorithms.losses.kl import KL
from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.functions.columns import compared, spread, trained
from rillflow.trainer.graph.registry import REGISTRY, Function
from rillflow.trainer.graph.step import Step

if TYPE_CHECKING:
    from rillflow.trainer.graph.databuffer import Column


def punish_overlong(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """DAPO's soft punishment, by the number of sampled tokens."""
    overlong = step.config.overlong
    if overlong is None:
        raise GraphError("punish_overlong does not know what is long", "give trainer.overlong: {longest: …, margin: …}")
    return {"reward_R": data["reward_R"] + soft_overlong(data["answer_R"], overlong.longest, overlong.margin)}


def score_reward(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """The reward as played, plus what a reward model in a stage gave."""
    return {"reward_R": data["reward_R"] + data["score_R"]}


def kl_reward(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """What each token pays for its distance from the reference: of the policy that sampled it, since the estimators are
    for tokens of the policy they are asked about."""
    kl = step.config.kl
    if kl is None:
        raise GraphError("kl_reward does not know what a distance costs", "give trainer.kl: {where: reward, …}")
    sampled_T, reference_T = (torch.from_numpy(trained(data, name)) for name in ("old_N", "reference_N"))
    distance_T = KL[kl.estimator](sampled_T, reference_T).numpy()
    return {"kl_N": spread(data, kl.coefficient * distance_T)}


def group_statistics(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Of rewards as they are now: the ledger's are of the rewards as played. Over those rows of a group that are in the
    batch, whichever ranks hold them."""
    groups = compared(data, data["reward_R"], np.arange(len(data)), step.peers)
    return {"group_mean_R": groups.mean_R, "group_std_R": groups.std_R, "group_size_R": groups.size_R}


_STATISTICS = ("group_mean_R", "group_std_R", "group_size_R")
REGISTRY.add(Function("punish_overlong", "reward", "compute", punish_overlong, ("reward_R", "answer_R"), ("reward_R",)))
REGISTRY.add(Function("score_reward", "reward", "compute", score_reward, ("reward_R", "score_R"), ("reward_R",)))
REGISTRY.add(Function("kl_reward", "reward", "compute", kl_reward, ("reference_N", "old_N", "mask_N"), ("kl_N",)))
REGISTRY.add(
    Function(
        "group_statistics",
        "reward",
        "compute",
        group_statistics,
        ("reward_R", "member_R", "alike_R", *_STATISTICS),
        _STATISTICS,
        scope="batch",
    )
)

"""The functions of the built-in graphs. Importing this package registers them.

rows        fetch and generate; scores of models; rewards; advantages from them, or from a critic's values (GAE)
train       the actor's and the critic's objectives
"""

from __future__ import annotations

from rillflow.trainer.graph.functions.rows import (
    actor_logprobs,
    advantages,
    batch_advantages,
    critic_values,
    fetch,
    gae,
    generate,
    group_statistics,
    kl_reward,
    publish,
    punish_overlong,
    reference_logprobs,
    score_reward,
)
from rillflow.trainer.graph.functions.train import train_actor, train_critic
from rillflow.trainer.graph.nodes import REGISTRY, Function

_STATISTICS = ("group_mean_R", "group_std_R", "group_size_R")
_ADVANTAGE = ("reward_R", *_STATISTICS)

# Each entry: name, role, kind, function, the columns that it reads, the columns that it makes.
for _function in (
    Function("fetch", "actor", "fetch", fetch, gives=("answer_R",), default=True),
    Function("generate", "actor", "generate", generate, gives=("answer_R",), default=True),
    Function("actor_logprobs", "actor", "infer", actor_logprobs, gives=("proximal_N",), default=True),
    Function("reference_logprobs", "reference", "infer", reference_logprobs, gives=("reference_N",), default=True),
    Function("critic_values", "critic", "infer", critic_values, gives=("value_N",), default=True),
    Function("punish_overlong", "reward", "compute", punish_overlong, ("reward_R", "answer_R"), ("reward_R",)),
    Function("score_reward", "reward", "compute", score_reward, ("reward_R", "score_R"), ("reward_R",)),
    Function("kl_reward", "reward", "compute", kl_reward, ("reference_N", "old_N", "mask_N"), ("kl_N",)),
    Function(
        "group_statistics", "reward", "compute", group_statistics,
        ("reward_R", "member_R", "alike_R", *_STATISTICS), _STATISTICS, scope="batch",
    ),
    Function("advantages", "actor", "compute", advantages, _ADVANTAGE, ("advantage_N",), default=True),
    Function(
        "batch_advantages", "actor", "compute", batch_advantages,
        (*_ADVANTAGE, "mask_N", "member_R", "alike_R", "step_reward_N", "kl_N?"), ("advantage_N",), scope="batch",
    ),
    Function(
        "gae", "critic", "compute", gae,
        ("reward_R", "step_reward_N", "mask_N", "value_N", "kl_N?"), ("advantage_N", "return_N"),
        scope="batch", default=True,
    ),
    Function(
        "train_actor", "actor", "train", train_actor,
        ("advantage_N", "old_N", "mask_N", "member_R", "proximal_N?", "reference_N?"), default=True,
    ),
    Function(
        "train_critic", "critic", "train", train_critic, ("value_N", "return_N", "mask_N", "member_R"), default=True
    ),
    Function("publish", "actor", "publish", publish, default=True),
):  # fmt: skip
    REGISTRY.add(_function)

"""A registry of small functions with the names and columns of the real ones, and chains made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rillflow.trainer.graph.nodes import Function, Kind, Registry, Role, Scope


def stub(
    name: str, role: Role, kind: Kind, needs: str = "", gives: str = "", *, scope: Scope = "part", default: bool = False
) -> Function:
    """Makes zeros of every column that it gives; columns are written with spaces between."""

    def on_step(step: Any) -> Any: ...

    def on_data(step: Any, data: Any) -> Mapping[str, Any]:
        return {c: np.zeros(len(data) if c.endswith("_R") else len(data.rows.tokens_N)) for c in gives.split()}

    run = on_data if kind in ("infer", "compute", "train") else on_step
    return Function(name, role, kind, run, tuple(needs.split()), tuple(gives.split()), scope, default)


def stubs() -> Registry:
    registry = Registry()
    for entry in (
        stub("fetch", "actor", "fetch", gives="answer_R", default=True),
        stub("generate", "actor", "generate", gives="answer_R", default=True),
        stub("actor_logprobs", "actor", "infer", gives="proximal_N", default=True),
        stub("reference_logprobs", "reference", "infer", gives="reference_N", default=True),
        stub("critic_values", "critic", "infer", gives="value_N", default=True),
        stub("punish_overlong", "reward", "compute", "reward_R answer_R", "reward_R"),
        stub("kl_reward", "reward", "compute", "reference_N", "kl_N"),
        stub("group_statistics", "reward", "compute", "reward_R member_R group_size_R group_mean_R group_std_R",
             "group_mean_R group_std_R", scope="batch"),
        stub("advantages", "actor", "compute", "reward_R kl_N?", "advantage_N", default=True),
        stub("gae", "critic", "compute", "reward_R value_N kl_N?", "advantage_N return_N", scope="batch", default=True),
        stub("train_actor", "actor", "train", "advantage_N proximal_N? reference_N?", default=True),
        stub("train_critic", "critic", "train", "value_N return_N", default=True),
        stub("publish", "actor", "publish", default=True),
    ):  # fmt: skip
        registry.add(entry)
    return registry

"""Every algorithm has a graph, by its options and mode; nodes of a recipe find their place in it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from rillflow.config import TrainerConfig
from rillflow.config.trainer import AlgorithmConfig
from rillflow.errors import GraphError
from rillflow.trainer.graph import function
from rillflow.trainer.graph.builtin import Mode, builtin, chain_of

ALGORITHMS = get_args(AlgorithmConfig.model_fields["algorithm"].annotation)
OVERLONG = {"longest": 100, "margin": 10}


def ids(mode: Mode = "asynchronous", **settings: Any) -> list[str]:
    return [node.id for node in chain_of(TrainerConfig(**settings), mode).nodes]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", ["asynchronous", "colocated"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl": {"where": "loss"}, "overlong": OVERLONG},
        {"kl": {"where": "reward"}, "truncate": 2.0, "updates": 2},
        {"step_rewards": "to_go", "epochs": 2, "ranks": 4, "overlong_filter": True},
    ],
    ids=["plain", "kl in loss", "kl in reward", "step rewards"],
)
def test_every_algorithm_can_be_planned(algorithm: str, mode: Mode, options: dict[str, Any]) -> None:
    lengths = {"norm_tokens": 100} if algorithm == "dr_grpo" else {}
    chain = ids(mode, algorithm=algorithm, **lengths, **options)
    assert chain[0] == ("generate" if mode == "colocated" else "fetch")
    assert chain[-2:] == ["train_actor", "publish"]
    assert ("train_critic" in chain) == (algorithm == "ppo")
    assert ("reference_logprobs" in chain) == ("kl" in options)
    assert ("actor_logprobs" in chain) == (
        "truncate" in options or (algorithm == "decoupled_ppo" and "epochs" in options)
    )


def test_graphs_as_they_are() -> None:
    assert ids() == ["fetch", "advantages", "train_actor", "publish"]
    assert ids(algorithm="reinforce_plus_plus")[1] == "batch_advantages"
    assert ids("colocated", algorithm="ppo", kl={"where": "reward"}, truncate=2.0, overlong=OVERLONG) == [
        "generate", "actor_logprobs", "reference_logprobs", "critic_values", "punish_overlong", "kl_reward", "gae",
        "train_critic", "train_actor", "publish",
    ]  # fmt: skip


def test_an_own_graph_with_statistics_of_older_rewards_is_refused() -> None:
    punish = {"function": "punish_overlong"}
    ends = ["advantages", "train_actor", "publish"]
    with pytest.raises(GraphError, match="group_mean_R, which is older than the rewards of punish") as seen:
        ids(overlong=OVERLONG, graph=["fetch", punish, *ends])
    assert seen.value.hint == "add a node group_statistics after punish_overlong"
    assert "group_statistics" in ids(overlong=OVERLONG, graph=["fetch", punish, "group_statistics", *ends])


def test_generating_is_refused_where_rollout_nodes_do_it() -> None:
    graph = ["generate", "advantages", "train_actor", "publish"]
    assert ids("colocated", graph=graph) == graph
    with pytest.raises(GraphError, match="generate generates, but in asynchronous mode rollout nodes do that"):
        ids(graph=graph)


def test_fetching_is_refused_where_nobody_else_plays() -> None:
    graph = ["fetch", "advantages", "train_actor", "publish"]
    assert ids("multiplexed", graph=graph) == graph
    with pytest.raises(GraphError, match="fetch fetches, but in colocated mode episodes are played only"):
        ids("colocated", graph=graph)


def test_rewards_made_anew_are_compared_anew() -> None:
    assert ids(overlong=OVERLONG)[1:4] == ["punish_overlong", "group_statistics", "advantages"]
    assert "group_statistics" not in ids(algorithm="ppo", overlong=OVERLONG)  # nothing is compared with a group
    own = [f"{__file__}:own_statistics"]
    assert ids(overlong=OVERLONG, nodes=own)[1:4] == ["punish_overlong", "own_statistics", "advantages"]


def test_a_graph_is_what_a_recipe_could_write() -> None:
    config = TrainerConfig(algorithm="ppo", kl={"where": "reward"})
    written = [node.model_dump() for node in builtin(config)]
    same = TrainerConfig(algorithm="ppo", kl={"where": "reward"}, graph=written)
    assert chain_of(same).digest == chain_of(config).digest


def test_nodes_of_a_recipe_are_ordered_by_their_columns() -> None:
    assert ids(nodes=[f"{__file__}:hardness", f"{__file__}:shorter"]) == [
        "fetch", "hardness", "shorter", "group_statistics", "advantages", "train_actor", "publish",
    ]  # fmt: skip
    with pytest.raises(GraphError, match="two nodes have the id 'advantages'"):
        ids(nodes=["advantages"])
    with pytest.raises(GraphError, match="wants its data on 3 ranks, but the trainer has 2"):
        ids(ranks=2, nodes=[{"function": f"{__file__}:hardness", "ranks": 3}])


@function("shorter", role="reward", kind="compute", needs=["reward_R", "hardness_R"], gives=["reward_R"])
def shorter(step: Any, data: Any) -> Any: ...


@function("hardness", role="reward", kind="compute", needs=["length_R"], gives=["hardness_R"])
def hardness(step: Any, data: Any) -> Any: ...


@function("own_statistics", role="reward", kind="compute", needs=["reward_R"], gives=["group_mean_R", "group_std_R"])
def own_statistics(step: Any, data: Any) -> Any: ...

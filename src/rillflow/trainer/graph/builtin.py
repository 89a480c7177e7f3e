"""The functions of the built-in graphs, and the graph of every algorithm, built from the recipe's trainer section.

    fetch or generate ─▶ scores of models (if an option needs them) ─▶ rewards ─▶ advantages ─▶ train ─▶ publish

Advantages come from the statistics of groups, from the whole batch or from a critic (GAE). Losses differ inside the
train node. The planner places a user's nodes (`trainer.nodes`) by the columns that they read and make. Importing this
module registers the functions of `rows` and `train`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from rillflow.config import NodeConfig, TrainerConfig
from rillflow.errors import GraphError
from rillflow.trainer.batches import REFERENCE, SCORE
from rillflow.trainer.graph.nodes import REGISTRY, Function, Node, Registry, make_node
from rillflow.trainer.graph.planner import STATISTICS, Chain, check_staged, plan
from rillflow.trainer.graph.rows import (
    actor_logprobs,
    advantage_function,
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
from rillflow.trainer.graph.train import train_actor, train_critic

Mode = Literal["asynchronous", "colocated", "multiplexed"]
PUBLISH = "publish"  # the function of the last node of every graph

_GROUPS = (*STATISTICS, "group_size_R")
_ADVANTAGE = ("reward_R", *_GROUPS)

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
        ("reward_R", "member_R", "alike_R", *_GROUPS), _GROUPS, scope="batch",
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
    Function(PUBLISH, "actor", "publish", publish, default=True),
):  # fmt: skip
    REGISTRY.add(_function)


def chain_of(
    config: TrainerConfig,
    mode: Mode = "asynchronous",
    *,
    staged: Mapping[str, str] = MappingProxyType({}),
    registry: Registry = REGISTRY,
) -> Chain:
    """Return the chain that a trainer runs: the recipe's own graph, or the algorithm's with the recipe's nodes.

    `staged` are the columns that come with the samples, each with the name of the stage that made it.
    """
    if config.graph is not None:
        nodes = [make_node(each, registry) for each in config.graph]
        chain = plan(_with_staged(nodes, staged), registry, ranks=config.teams)
        check_staged(chain.nodes, staged, config)
        source = chain.nodes[0]
        if source.kind == "generate" and mode == "asynchronous":
            raise GraphError(
                f"node {source.id} generates, but in asynchronous mode rollout nodes do that",
                "use the function fetch instead, or set mode: colocated",
            )
        if source.kind == "fetch" and mode == "colocated":
            raise GraphError(
                f"node {source.id} fetches, but in colocated mode episodes are played only by a step that generates",
                "use the function generate instead, or set mode: asynchronous or multiplexed",
            )
        return chain
    nodes = [make_node(each, registry) for each in (*builtin(config, mode, staged), *config.nodes)]
    chain = plan(_with_staged(_regrouped(nodes, registry), staged), registry, ranks=config.teams)
    check_staged(chain.nodes, staged, config)
    return chain


def builtin(config: TrainerConfig, mode: Mode = "asynchronous", staged: Collection[str] = ()) -> list[NodeConfig]:
    """Return the algorithm's own nodes, as a recipe would write them, without those whose columns are `staged`."""
    return [NodeConfig(function=name) for name in _names(config, mode, staged)]


def _names(config: TrainerConfig, mode: Mode, staged: Collection[str]) -> Iterator[str]:
    critic = config.algorithm == "ppo"
    yield "fetch" if mode == "asynchronous" else "generate"
    if needs_proximal(config):
        yield "actor_logprobs"
    if config.kl is not None and REFERENCE not in staged:
        yield "reference_logprobs"
    if critic:
        yield "critic_values"
    if SCORE in staged:
        yield "score_reward"
    if config.overlong is not None:
        yield "punish_overlong"
    if config.kl is not None and config.kl.where == "reward":
        yield "kl_reward"
    yield advantage_function(config)
    if critic:
        yield "train_critic"
    yield "train_actor"
    yield PUBLISH


def needs_proximal(config: TrainerConfig) -> bool:
    """Return whether the batch is scored under the actor's weights before its first update.

    Losses clip around the log-probs that the engine recorded, which needs no such pass. Truncated importance sampling
    needs it, and decoupled PPO with more than one update.
    """
    several = config.updates * config.epochs > 1
    return config.truncate is not None or (config.algorithm == "decoupled_ppo" and several)


def _with_staged(nodes: list[Node], staged: Collection[str]) -> list[Node]:
    """Let the source declare the columns that come with the samples."""
    return [
        replace(node, function=replace(node.function, gives=(*node.function.gives, *staged)))
        if node.is_source
        else node
        for node in nodes
    ]


def _regrouped(nodes: list[Node], registry: Registry) -> list[Node]:
    """Add `group_statistics` if a node changes rewards: the ledger's statistics belong to the rewards as played."""
    working = [node for node in nodes if not node.is_source]
    changed = any("reward_R" in node.gives for node in working)
    given = any(column in node.gives for node in working for column in STATISTICS)
    used = any(column in node.reads for node in working for column in STATISTICS)
    return [*nodes, make_node("group_statistics", registry)] if changed and used and not given else nodes

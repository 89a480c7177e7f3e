"""The graph of every algorithm, built from the recipe's trainer section.

    fetch or generate ─▶ scores of models (if an option needs them) ─▶ rewards ─▶ advantages ─▶ train ─▶ publish

Advantages come from the statistics of groups, from the whole batch or from a critic (GAE). Losses differ inside the
train node. The planner places a user's nodes (`trainer.nodes`) by the columns that they read and make.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from rillflow.config import NodeConfig, TrainerConfig
from rillflow.errors import GraphError
from rillflow.trainer.batches import REFERENCE, SCORE
from rillflow.trainer.graph.functions.rows import advantage_function
from rillflow.trainer.graph.nodes import REGISTRY, Node, Registry, make_node
from rillflow.trainer.graph.planner import STATISTICS, Chain, check_staged, plan

Mode = Literal["asynchronous", "colocated", "multiplexed"]


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
        chain = plan(_with_staged(nodes, staged), registry, ranks=config.ranks)
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
    chain = plan(_with_staged(_regrouped(nodes, registry), staged), registry, ranks=config.ranks)
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
    yield "publish"


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

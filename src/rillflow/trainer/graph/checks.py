"""What must hold of a graph: who is in it, in which places, and that every column read has been made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rillflow.config import TrainerConfig
from rillflow.errors import GraphError, did_you_mean
from rillflow.trainer.graph.nodes import SOURCES, Node
from rillflow.trainer.graph.registry import Registry
from rillflow.trainer.staged import REFERENCE, SCORE


def check_shape(nodes: Sequence[Node], ranks: int) -> None:
    """All that can be said before the nodes are ordered."""
    _check_ids(nodes)
    _check_kinds(nodes)
    for node in nodes:
        if node.ranks is None:
            continue
        if node.is_source or node.kind == "publish":
            raise GraphError(f"node {node.id} cannot have `ranks`: it holds no data", "leave it out")
        if not 1 <= node.ranks <= ranks:
            raise GraphError(
                f"node {node.id} wants its data on {node.ranks} ranks, there are {ranks}",
                "raise trainer.ranks, or lower the node's `ranks`",
            )


def _check_ids(nodes: Sequence[Node]) -> None:
    ids = [node.id for node in nodes]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise GraphError(
            f"there are two nodes {twice[0]!r}{shown(nodes)}", "give one of them another `id`, or take one out"
        )
    for node in nodes:
        for name in node.needs or ():
            if name not in ids:
                raise GraphError(
                    f"node {node.id} needs {name!r}, which is no node's id{shown(nodes)}",
                    f"{did_you_mean(name, ids)}there are: {', '.join(ids)}",
                )


def _check_kinds(nodes: Sequence[Node]) -> None:
    sources = [node.id for node in nodes if node.is_source]
    publishes = [node.id for node in nodes if node.kind == "publish"]
    if len(sources) != 1:
        what = f"{len(sources)} sources ({', '.join(sources)})" if sources else "no source"
        raise GraphError(
            f"the step graph has {what}{shown(nodes)}",
            f"give it exactly one node of kind {' or '.join(SOURCES)}: where its data come from",
        )
    if not any(node.kind == "train" for node in nodes):
        raise GraphError(f"the step graph trains nothing{shown(nodes)}", "add a node of kind train: train_actor")
    if len(publishes) != 1:
        what = f"{len(publishes)} publish nodes ({', '.join(publishes)})" if publishes else "no publish node"
        raise GraphError(
            f"the step graph has {what}{shown(nodes)}",
            "give it exactly one, as its last: engines learn of new weights by it",
        )
    for node in nodes:
        if node.is_source and node.needs:
            raise GraphError(
                f"{node.id} is the source and must come first, but needs {', '.join(node.needs)}",
                "take its `needs` out",
            )
        if publishes[0] in (node.needs or ()):
            raise GraphError(
                f"{publishes[0]} must come last, but {node.id} needs it", f"take it out of the `needs` of {node.id}"
            )


def check_columns(chain: Sequence[Node], registry: Registry) -> None:
    """Every column that a node reads has been made when it runs."""
    made: set[str] = set()
    for place, node in enumerate(chain):
        for column in node.reads:
            if column not in made:
                raise _missing(node, column, chain, made, registry, later=chain[place:])
        made |= set(node.gives)


# What is computed from the rewards of a group, and is of no use once these have changed.
STATISTICS = ("group_mean_R", "group_std_R")


def check_statistics(chain: Sequence[Node]) -> None:
    """No node reads statistics of groups that were made before a node changed the rewards."""
    changed: Node | None = None
    for node in chain:
        if any(column in node.gives for column in STATISTICS):  # whoever makes them anew may look at the old ones
            changed = None
            continue
        stale = [column for column in STATISTICS if column in node.reads]
        if changed is not None and stale:
            raise GraphError(
                f"node {node.id} reads {stale[0]} of the rewards before {changed.id} changed them{shown(chain)}",
                f"add a node group_statistics after {changed.id}",
            )
        if "reward_R" in node.gives and not node.is_source:
            changed = node


def check_staged(chain: Sequence[Node], staged: Mapping[str, str], config: TrainerConfig) -> None:
    """Every column that a stage writes is read by a node, and made by none."""
    for column, stage in staged.items():
        working = [node for node in chain if not node.is_source]
        readers = [node for node in working if column in (*node.reads, *node.optional)]
        makers = [node.id for node in working if column in node.gives]
        if makers:
            raise GraphError(
                f"stage {stage} writes {column}, and node {makers[0]} makes it too", "take one of the two out"
            )
        if not readers:
            raise GraphError(
                f"stage {stage} writes {column}, which no node of the step graph reads{shown(chain)}",
                f'take the stage out, or add a node of yours that declares needs=["{column}"] (trainer.nodes)',
            )
        if column == REFERENCE and config.kl is None and all(node.kind == "train" for node in readers):
            raise GraphError(
                f"stage {stage} writes {column}, which nothing reads: the recipe has no KL term",
                "give trainer.kl, or take the stage out",
            )
        if column == SCORE and config.by_steps:
            raise GraphError(
                f"stage {stage} scores samples, and step_rewards={config.step_rewards} reads rewards of answers",
                "leave step_rewards out, or take the stage out",
            )


def _missing(
    node: Node, column: str, chain: Sequence[Node], made: set[str], registry: Registry, *, later: Sequence[Node]
) -> GraphError:
    makers = [other.id for other in later if column in other.gives and other is not node]
    if makers:
        return GraphError(
            f"node {node.id} reads {column} before {makers[0]} makes it{shown(chain)}",
            f"add {makers[0]} to the `needs` of {node.id}",
        )
    could = [
        f"{name} ({found.role} {found.kind})"
        for name in registry.names
        if (found := registry.named(name)) and column in found.gives and name != node.function.name
    ]
    return GraphError(
        f"node {node.id} reads {column}, which no node before it makes{shown(chain)}",
        f"add a node that makes it: {', '.join(could)}" if could else f"{did_you_mean(column, made)}{_own(column)}",
    )


def _own(column: str) -> str:
    return f'add a node whose function declares gives=["{column}"]'


def shown(nodes: Sequence[Node]) -> str:
    """The nodes as lines to go under a message."""
    width = max((len(node.id) for node in nodes), default=0)
    lines = [f"  {node.id:<{width}}  {node.role} {node.kind}{_flow(node)}" for node in nodes]
    return "".join(f"\n{line}" for line in lines)


def _flow(node: Node) -> str:
    reads = ", ".join([*node.reads, *(f"{name}?" for name in node.optional)])
    gives = ", ".join(node.function.gives)
    return f": {reads or 'nothing'} -> {gives or 'nothing'}" if node.on_columns else f": {reads}" if reads else ""

"""Checks and orders the nodes of a graph: the result is the chain that every rank runs.

A node's `needs` give its place, otherwise its columns do: a node comes after those that make what it reads. A node that
replaces a column comes after the column's earlier makers and before the nodes that only read it. The source is first,
publish is last, and training comes after everything that makes columns, unless a node asks to come after a train node:
nodes that score the batch use the weights that the step began with.

The chain is a linear extension of that order, with ties in the order of definition. So one node is active at a time,
and ranks with the same nodes have the same chain.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rillflow.config import TrainerConfig
from rillflow.errors import GraphError, did_you_mean
from rillflow.trainer.batches import REFERENCE, SCORE
from rillflow.trainer.graph.nodes import REGISTRY, SOURCES, Definition, Node, Registry, make_node
from rillflow.trainer.parallel import Peers


def check_shape(nodes: Sequence[Node], ranks: int) -> None:
    """Check ids, kinds and ranks, which do not depend on the order."""
    _check_ids(nodes)
    _check_kinds(nodes)
    for node in nodes:
        if node.ranks is None:
            continue
        if node.is_source or node.kind == "publish":
            raise GraphError(f"node {node.id} cannot have `ranks`: it holds no data", "leave `ranks` out")
        if not 1 <= node.ranks <= ranks:
            raise GraphError(
                f"node {node.id} wants its data on {node.ranks} ranks, but the trainer has {ranks}",
                "raise trainer.ranks, or lower the node's `ranks`",
            )


def _check_ids(nodes: Sequence[Node]) -> None:
    ids = [node.id for node in nodes]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise GraphError(
            f"two nodes have the id {twice[0]!r}{shown(nodes)}", "give one of them another `id`, or remove one"
        )
    for node in nodes:
        for name in node.needs or ():
            if name not in ids:
                raise GraphError(
                    f"node {node.id} needs {name!r}, which is not the id of a node{shown(nodes)}",
                    f"{did_you_mean(name, ids)}known ids: {', '.join(ids)}",
                )


def _check_kinds(nodes: Sequence[Node]) -> None:
    sources = [node.id for node in nodes if node.is_source]
    publishes = [node.id for node in nodes if node.kind == "publish"]
    if len(sources) != 1:
        what = f"{len(sources)} sources ({', '.join(sources)})" if sources else "no source"
        raise GraphError(
            f"the step graph has {what}{shown(nodes)}",
            f"give it exactly one node of kind {' or '.join(SOURCES)}, the source of its data",
        )
    if not any(node.kind == "train" for node in nodes):
        raise GraphError(f"the step graph trains nothing{shown(nodes)}", "add a node of kind train: train_actor")
    if len(publishes) != 1:
        what = f"{len(publishes)} publish nodes ({', '.join(publishes)})" if publishes else "no publish node"
        raise GraphError(
            f"the step graph has {what}{shown(nodes)}",
            "give it exactly one, as its last node: it hands new weights to engines",
        )
    for node in nodes:
        if node.is_source and node.needs:
            raise GraphError(
                f"{node.id} is the source and must come first, but needs {', '.join(node.needs)}",
                "remove its `needs`",
            )
        if publishes[0] in (node.needs or ()):
            raise GraphError(
                f"{publishes[0]} must come last, but {node.id} needs it", f"remove it from the `needs` of {node.id}"
            )


def check_columns(chain: Sequence[Node], registry: Registry) -> None:
    """Check that every column that a node reads has been made when it runs."""
    made: set[str] = set()
    for place, node in enumerate(chain):
        for column in node.reads:
            if column not in made:
                raise _missing(node, column, chain, made, registry, later=chain[place:])
        made |= set(node.gives)


# Columns that are computed from the rewards of a group, and are outdated once the rewards have changed.
STATISTICS = ("group_mean_R", "group_std_R")


def check_statistics(chain: Sequence[Node]) -> None:
    """Check that no node reads statistics of groups that are older than a change of the rewards."""
    changed: Node | None = None
    for node in chain:
        if any(column in node.gives for column in STATISTICS):  # a node that replaces them may read the old ones
            changed = None
            continue
        stale = [column for column in STATISTICS if column in node.reads]
        if changed is not None and stale:
            raise GraphError(
                f"node {node.id} reads {stale[0]}, which is older than the rewards of {changed.id}{shown(chain)}",
                f"add a node group_statistics after {changed.id}",
            )
        if "reward_R" in node.gives and not node.is_source:
            changed = node


def check_staged(chain: Sequence[Node], staged: Mapping[str, str], config: TrainerConfig) -> None:
    """Check that a node reads every column that a stage writes, and that no node makes it."""
    for column, stage in staged.items():
        working = [node for node in chain if not node.is_source]
        readers = [node for node in working if column in (*node.reads, *node.optional)]
        makers = [node.id for node in working if column in node.gives]
        if makers:
            raise GraphError(
                f"stage {stage} writes {column}, and node {makers[0]} makes it too", "remove one of the two"
            )
        if not readers:
            raise GraphError(
                f"stage {stage} writes {column}, which no node of the step graph reads{shown(chain)}",
                f'remove the stage, or add your own node that declares needs=["{column}"] (trainer.nodes)',
            )
        if column == REFERENCE and config.kl is None and all(node.kind == "train" for node in readers):
            raise GraphError(
                f"stage {stage} writes {column}, but the recipe has no KL term that reads it",
                "set trainer.kl, or remove the stage",
            )
        if column == SCORE and config.by_steps:
            raise GraphError(
                f"stage {stage} scores samples, but step_rewards={config.step_rewards} reads rewards of answers",
                "leave step_rewards out, or remove the stage",
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
        f"add a node that makes it: {', '.join(could)}" if could else f"{did_you_mean(column, made)}{_declare(column)}",
    )


def _declare(column: str) -> str:
    return f'add a node whose function declares gives=["{column}"]'


def shown(nodes: Sequence[Node]) -> str:
    """Return the nodes as lines to append to a message."""
    width = max((len(node.id) for node in nodes), default=0)
    lines = [f"  {node.id:<{width}}  {node.role} {node.kind}{_flow(node)}" for node in nodes]
    return "".join(f"\n{line}" for line in lines)


def _flow(node: Node) -> str:
    reads = ", ".join([*node.reads, *(f"{name}?" for name in node.optional)])
    gives = ", ".join(node.function.gives)
    return f": {reads or 'nothing'} -> {gives or 'nothing'}" if node.on_columns else f": {reads}" if reads else ""


# ---------------------------------------------------------------- the chain


@dataclass(frozen=True)
class Edge:
    """`columns` travel along the edge; an edge without columns is an order only."""

    before: str
    after: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chain:
    """The nodes in the order in which they run."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @property
    def roles(self) -> set[str]:
        """Return the roles that need a model."""
        return {node.role for node in self.nodes if node.kind in ("infer", "train")}

    @cached_property
    def digest(self) -> str:
        """Return a hash that is equal for chains with the same nodes and options."""
        said = [
            [node.id, node.role, node.kind, node.function.name, node.function.scope, node.ranks, node.options]
            for node in self.nodes
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()


def plan(definitions: Sequence[Definition], registry: Registry = REGISTRY, *, ranks: int = 1) -> Chain:
    """Return the chain of these nodes; GraphError, with a hint, if it could not run on `ranks` ranks."""
    nodes = [make_node(definition, registry) for definition in definitions]
    check_shape(nodes, ranks)
    edges = _edges(nodes)
    places = {node.id: place for place, node in enumerate(nodes)}
    try:
        order = ordered(places, [(edge.before, edge.after) for edge in edges])
    except GraphError as error:
        raise GraphError(error.message + shown(nodes), error.hint) from None
    by_id = {node.id: node for node in nodes}
    chain = Chain(tuple(by_id[name] for name in order), edges)
    check_columns(chain.nodes, registry)
    check_statistics(chain.nodes)
    return chain


def agree(chain: Chain, peers: Peers) -> None:
    """Raise GraphError if a rank has another chain than rank 0. Collective."""
    said = [message.decode() for message in peers.everyone(chain.digest.encode())]
    others = [rank for rank, digest in enumerate(said) if digest != said[0]]
    if others:
        raise GraphError(
            f"the step graph of ranks {', '.join(map(str, others))} differs from that of rank 0",
            "start all ranks with the same recipe and the same version of Rillflow",
        )


# ---------------------------------------------------------------- edges


def _edges(nodes: Sequence[Node]) -> tuple[Edge, ...]:
    found: dict[tuple[str, str], set[str]] = {}

    def add(before: Node, after: Node, *columns: str) -> None:
        found.setdefault((before.id, after.id), set()).update(columns)

    makers = _makers(nodes)
    by_id = {node.id: node for node in nodes}
    for node in nodes:
        if node.needs is not None:
            for name in node.needs:
                shared = set(by_id[name].gives) & {*node.reads, *node.optional}
                add(by_id[name], node, *shared)
        else:
            for before, column in _inferred(node, makers):
                add(before, node, *column)
    for before, after, columns in _by_kind(nodes, list(found)):
        add(before, after, *columns)
    return tuple(Edge(*pair, tuple(sorted(columns))) for pair, columns in sorted(found.items()))


def _makers(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Return the makers of each column: the source first, the others in the order of definition."""
    makers: dict[str, list[Node]] = {}
    for node in sorted(nodes, key=lambda node: not node.is_source):
        for column in node.gives:
            makers.setdefault(column, []).append(node)
    return makers


def _inferred(node: Node, makers: Mapping[str, Sequence[Node]]) -> Iterable[tuple[Node, tuple[str, ...]]]:
    """Yield the nodes before a node, with the columns that it takes from each."""
    reads = {*node.reads, *node.optional}
    for column in sorted(reads | set(node.function.gives)):
        of = makers.get(column, [])
        earlier = list(of[: of.index(node)] if node in of else of)
        for place, maker in enumerate(earlier, 1):
            yield maker, (column,) if column in reads and place == len(earlier) else ()


def _by_kind(nodes: Sequence[Node], pairs: Sequence[tuple[str, str]]) -> Iterable[tuple[Node, Node, tuple[str, ...]]]:
    """Yield edges by kind: source first, publish last, training after nodes that make columns, unless they come later.

    A column that no node reads goes to the loss of the train nodes.
    """
    trains = [node for node in nodes if node.kind == "train"]
    later = _reachable({node.id for node in trains}, pairs)
    read = {column for node in nodes for column in (*node.reads, *node.optional)}
    for node in nodes:
        for other in (other for other in nodes if other is not node):
            training = other in trains and other.needs is None and node.on_columns and node.id not in later
            if (node.is_source and not other.is_source) or other.kind == "publish" or training:
                yield node, other, tuple(set(node.gives) - read) if training else ()


def _reachable(start: set[str], pairs: Sequence[tuple[str, str]]) -> set[str]:
    """Return all names that come after `start`."""
    seen: set[str] = set()
    fresh = set(start)
    while fresh:
        fresh = {after for before, after in pairs if before in fresh} - seen
        seen |= fresh
    return seen


# ---------------------------------------------------------------- order


def ordered(places: Mapping[str, int], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return names in topological order, ties by place, then by name (Kahn). GraphError names a cycle."""
    after: dict[str, set[str]] = {name: set() for name in places}
    waits: dict[str, int] = dict.fromkeys(places, 0)
    for before, then in set(edges):
        after[before].add(then)
        waits[then] += 1
    ready = [(places[name], name) for name, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for then in after[name]:
            waits[then] -= 1
            if waits[then] == 0:
                heapq.heappush(ready, (places[then], then))
    if len(order) < len(places):
        circle = _cycle({name: then - set(order) for name, then in after.items() if name not in order})
        raise GraphError(
            f"the step graph has a cycle: {' -> '.join(circle)}",
            "a node reads a column that depends on its own: give one of them `needs` that break the cycle",
        )
    return order


def _cycle(after: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle of a graph that has one, from its first name and back to it."""
    # Names without successors are not on a cycle: remove them until every name has one.
    left = {name: set(then) for name, then in after.items()}
    while ends := {name for name, then in left.items() if not then}:
        left = {name: then - ends for name, then in left.items() if name not in ends}
    path = [min(left)]
    while (follows := min(left[path[-1]])) not in path:
        path.append(follows)
    circle = path[path.index(follows) :]
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    return [*circle, circle[0]]

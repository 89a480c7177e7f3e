"""From nodes to the chain that every rank runs: checked, ordered, the same everywhere.

Order comes from `needs` where a node gives it, otherwise from columns: a node comes after those that make what it
reads. A node that makes a column anew comes after its earlier makers and before all who only read it. Besides, the
source is first, publish is last, and training comes after everything that makes columns, unless a node asks to come
after a train node: what scores the batch scores it under the weights that the step began with.

The chain is a linear extension of that order with ties in the order of definition: one node is active at a time, and
two ranks with the same nodes have the same chain.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rillflow.errors import GraphError
from rillflow.trainer.graph.checks import check_columns, check_shape, check_statistics, shown
from rillflow.trainer.graph.nodes import Definition, Node, make_node
from rillflow.trainer.graph.registry import REGISTRY, Registry
from rillflow.trainer.parallel.peers import Peers


@dataclass(frozen=True)
class Edge:
    """`columns` travel along it; without any it is an order only."""

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
        """Those that need a model."""
        return {node.role for node in self.nodes if node.kind in ("infer", "train")}

    @cached_property
    def digest(self) -> str:
        """Equal for chains that do the same, as far as a recipe says what they do."""
        said = [
            [node.id, node.role, node.kind, node.function.name, node.function.scope, node.ranks, node.options]
            for node in self.nodes
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()


def plan(definitions: Sequence[Definition], registry: Registry = REGISTRY, *, ranks: int = 1) -> Chain:
    """GraphError, with what to do, for anything that could not run on `ranks` ranks."""
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
    """Refuse to begin when a rank has another chain. Collective."""
    said = [message.decode() for message in peers.everyone(chain.digest.encode())]
    others = [rank for rank, digest in enumerate(said) if digest != said[0]]
    if others:
        raise GraphError(
            f"ranks {', '.join(map(str, others))} have another step graph than rank 0",
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
    """Who makes each column: the source first, the others in the order of definition."""
    makers: dict[str, list[Node]] = {}
    for node in sorted(nodes, key=lambda node: not node.is_source):
        for column in node.gives:
            makers.setdefault(column, []).append(node)
    return makers


def _inferred(node: Node, makers: Mapping[str, Sequence[Node]]) -> Iterable[tuple[Node, tuple[str, ...]]]:
    """What comes before a node, and the columns that it takes from there."""
    reads = {*node.reads, *node.optional}
    for column in sorted(reads | set(node.function.gives)):
        of = makers.get(column, [])
        earlier = list(of[: of.index(node)] if node in of else of)
        for place, maker in enumerate(earlier, 1):
            yield maker, (column,) if column in reads and place == len(earlier) else ()


def _by_kind(nodes: Sequence[Node], pairs: Sequence[tuple[str, str]]) -> Iterable[tuple[Node, Node, tuple[str, ...]]]:
    """Source first, publish last, training after all that makes columns and does not ask to come after training.

    A column that no node reads is for the loss of whoever trains.
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
    """All that come after `start`."""
    seen: set[str] = set()
    fresh = set(start)
    while fresh:
        fresh = {after for before, after in pairs if before in fresh} - seen
        seen |= fresh
    return seen


# ---------------------------------------------------------------- order


def ordered(places: Mapping[str, int], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Every name after all that come before it, ties by place, then by name (Kahn). GraphError names a cycle."""
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
            "a node reads what is made from what it makes: give one of them `needs` that break the circle",
        )
    return order


def _cycle(after: Mapping[str, set[str]]) -> list[str]:
    """One circle of a graph that has one, from its first name and back to it."""
    # Without the names that nothing follows: from each of the others one can go on for ever.
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

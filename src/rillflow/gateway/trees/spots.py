"""Where in a session's histories a node ends: an index by messages, so that a call finds its path without a search.

A spot is a place behind a sequence of messages. Every usable node lies at the spot behind the messages of its path;
a history is followed from the root's spot by one lookup for each message, however many branches there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rillflow.gateway.trees.messages import Message

if TYPE_CHECKING:
    from rillflow.gateway.trees.tree import Node


class Spot:
    """Behind some messages: the nodes that end here, and the spots behind one message more."""

    __slots__ = ("further", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.further: dict[bytes, Spot] = {}

    def behind(self, messages: Iterable[Message]) -> Spot:
        """The spot behind `messages` from here; made if there is none."""
        spot = self
        for message in messages:
            found = spot.further.get(message.key)
            if found is None:
                found = spot.further[message.key] = Spot()
            spot = found
        return spot

    def follow(self, history: Sequence[Message]) -> list[Spot]:
        """The spots behind the first message, the first two, …, as far as there are any."""
        spots: list[Spot] = []
        spot: Spot | None = self
        for message in history:
            spot = spot.next(message) if spot is not None else None
            if spot is None:
                break
            spots.append(spot)
        return spots

    def next(self, message: Message) -> Spot | None:
        """The spot behind one message more. A name that the agent has given to a sampled answer does not count."""
        found = self.further.get(message.key)
        if found is not None or not message.unnamed:
            return found
        found = self.further.get(message.unnamed)
        return found if found is not None and any(node.kind == "sampled" for node in found.nodes) else None


class Match(NamedTuple):
    """The path that represents the first `covered` messages of a history."""

    node: Node
    covered: int


def longest(spots: Sequence[Spot], history: Sequence[Message]) -> Match | None:
    """The longest path that `history`, which leads over `spots`, continues or repeats; None where there is none.

    Among equally long ones: the one that has most of the history's tool-call ids and reasoning, then a prompt for the
    very same history, then an answer rather than a prompt, then the oldest.
    """
    twins = any(len(spot.nodes) > 1 for spot in spots)
    plain = not twins and not any(message.reasoning for message in history[: len(spots)])
    likeness = None if plain else _Likeness(spots, history)
    for covered in range(len(spots), 0, -1):
        node = _best(spots[covered - 1].nodes, covered, history, likeness)
        if node is not None:
            return Match(node, covered)
    return None


def _best(nodes: Sequence[Node], covered: int, history: Sequence[Message], likeness: _Likeness | None) -> Node | None:
    asked = covered == len(history)
    # A given node ends with the generation prompt: only an answer, or nothing, can follow it.
    able = [node for node in nodes if node.kind != "given" or asked or history[covered].role == "assistant"]
    if likeness is None or not able:
        return able[0] if able else None
    wanted = "given" if asked else "sampled"
    ranked = [(likeness.of(node, covered), node.kind == wanted, -node.id, node) for node in able]
    like, _, _, node = max(ranked, key=lambda rank: rank[:3])
    return node if like >= 0 else None


class _Likeness:
    """How much a path is the history's beyond the keys of its messages.

    A message with the history's tool-call ids or reasoning counts one. A path is not the history's at all (-1) where
    it has another reasoning, or where another node at the same spot has the tool-call ids: what was sampled twice with
    the same text has two paths, each with its own continuation.
    """

    def __init__(self, spots: Sequence[Spot], history: Sequence[Message]) -> None:
        self._spots = spots
        self._history = history
        self._known: dict[Node, int] = {}

    def of(self, node: Node, covered: int) -> int:
        climbed: list[tuple[Node, int]] = []
        above: Node | None = node
        while above is not None and above not in self._known:
            covered -= len(above.messages)
            climbed.append((above, covered))
            above = above.parent
        like = 0 if above is None else self._known[above]
        for below, start in reversed(climbed):
            for place, mine in enumerate(below.messages, start):
                like = -1 if like < 0 else self._with(like, mine, place)
            self._known[below] = like
        return like

    def _with(self, like: int, mine: Message, place: int) -> int:
        theirs = self._history[place]
        if theirs.reasoning and theirs.reasoning != mine.reasoning:
            return -1
        like += bool(theirs.reasoning)
        if not theirs.call_ids or theirs.call_ids == mine.call_ids:
            return like + bool(theirs.call_ids)
        twins = (twin.messages for twin in self._spots[place].nodes if twin.kind == "sampled")
        return -1 if any(said[0].call_ids == theirs.call_ids for said in twins) else like

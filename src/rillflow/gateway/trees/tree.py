"""The token tree of one policy in one session.

A node holds only the tokens that it adds. A *given* node holds the rendered messages of a call that no node before
it represents, and the generation prompt; a *sampled* node below it holds what the engine returned, id for id. The
prompt of a call is the concatenation of the path to its given node, so what the model sampled is never tokenised
again: later calls carry the very ids. The same prompt sampled several times gives sibling sampled nodes.

Invariants: a sampled node's parent is a given node; a given node's parent is a sampled node, a given node or a
root; nodes are numbered in the order in which they were made, over all trees of a session; an abandoned node has no
children. Within a node versions follow the engine's: they rise, but where a restarted trainer moves the head back to
an older line they may fall.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.spots import Match, Spot, longest
from rillflow.types import Chunk, FinishReason

Kind = Literal["root", "given", "sampled"]
Fork = Literal["", "history", "template"]

RAW = b"raw"  # in the place of a key of tools (JSON, or empty): the root of prompts that are no messages
_NO_INTS, _NO_FLOATS = array("i"), array("f")


class Canonical(NamedTuple):
    """The template's own text of a path, by length and hash: how a template that rewrites history is caught."""

    length: int
    digest: bytes


class Seam(NamedTuple):
    """Sampling was cut behind the first `offset` tokens of a node, and went on; `cause` says why."""

    offset: int
    cause: str


class Node:
    """One piece of the tree. `finish` is None while the engine still samples it; only sampled nodes are added to.

    `call` is the id of its answer with the number of the choice: `{id}_{choice}`; `agent` is whom the call was of,
    where it said so; `constrained` says that it was sampled under a grammar.
    """

    __slots__ = (
        "abandoned",
        "agent",
        "call",
        "canonical",
        "children",
        "constrained",
        "finish",
        "fork",
        "id",
        "kind",
        "logprobs",
        "messages",
        "parent",
        "raw_logprobs",
        "seams",
        "spot",
        "temperature",
        "tokens",
        "versions",
    )

    def __init__(self, id: int, kind: Kind, parent: Node | None) -> None:
        sampled = kind == "sampled"
        self.id = id
        self.kind = kind
        self.parent = parent
        self.children: list[Node] = []
        self.messages: tuple[Message, ...] = ()
        # Compact, as their columns are: a session's tokens stay in memory until it ends.
        self.tokens = array("i") if sampled else _NO_INTS
        self.logprobs = array("f") if sampled else _NO_FLOATS
        self.raw_logprobs = array("f") if sampled else _NO_FLOATS
        self.versions = array("i") if sampled else _NO_INTS
        self.seams: tuple[Seam, ...] = ()
        self.temperature = 0.0
        self.constrained = False
        self.finish: FinishReason | None = None
        self.abandoned = False
        self.call = ""
        self.agent = ""
        self.fork: Fork = ""
        self.canonical: Canonical | None = None
        self.spot: Spot | None = None

    def add(self, chunk: Chunk) -> None:
        """Keep what the engine sampled, as it said it."""
        if chunk.seam:
            self.seams += (Seam(len(self.tokens), chunk.seam),)
        elif self.versions and chunk.tokens and self.versions[-1] != chunk.version:
            self.seams += (Seam(len(self.tokens), "weights"),)
        self.tokens.fromlist(chunk.tokens)
        self.logprobs.fromlist(chunk.logprobs)
        self.raw_logprobs.fromlist(chunk.raw_logprobs)
        self.versions.extend([chunk.version] * len(chunk.tokens))

    def end(self, finish: FinishReason, said: Message) -> None:
        """Sampling has ended; `said` is the message that the agent is shown for these tokens."""
        self.finish = finish
        self._represent((said,))

    def abandon(self) -> None:
        """Nobody saw these tokens: nothing extends them and nothing trains on them. Without any, the node goes.

        A node that a later call extends was seen: it stays as it is.
        """
        if self.children or self.abandoned:
            return
        self.abandoned = True
        if self.spot is not None:
            self.spot.nodes.remove(self)
        if not self.tokens and self.parent is not None:
            self.parent.children.remove(self)

    @property
    def usable(self) -> bool:
        """Whether an agent may continue from here."""
        return self.kind != "sampled" or (self.finish is not None and not self.abandoned)

    def path(self) -> list[Node]:
        """From below the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.kind != "root":
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def prompt(self) -> list[int]:
        """All ids of the path that ends here."""
        ids = array("i")
        for node in self.path():
            ids += node.tokens
        return ids.tolist()

    def _represent(self, messages: tuple[Message, ...]) -> None:
        """From now on a history that has `messages` behind the parent's is found here."""
        self.messages = messages
        if self.parent is not None and self.parent.spot is not None and not self.abandoned:
            self.spot = self.parent.spot.behind(messages)
            self.spot.nodes.append(self)


class TokenTree:
    """All paths of one policy. Histories that were rendered with other tools never share a path.

    `numbers` numbers the nodes: the trees of one session share it. `calls` are the answers by their call's id.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._roots: dict[bytes, Node] = {}
        self._numbers = count() if numbers is None else numbers
        self.calls: dict[str, list[Node]] = {}

    def root(self, tools: bytes) -> Node:
        if tools not in self._roots:
            root = self._roots[tools] = Node(next(self._numbers), "root", None)
            root.spot = Spot()
        return self._roots[tools]

    @property
    def empty(self) -> bool:
        return not any(root.children for root in self._roots.values())

    def roots(self) -> dict[bytes, Node]:
        """By the key of their tools; `RAW` for prompts that are no messages."""
        return dict(self._roots)

    def match(self, tools: bytes, history: Sequence[Message]) -> Match | None:
        """The longest path, of all in the tree, that `history` continues or repeats; see `longest`."""
        root = self._roots.get(tools)
        if root is None or root.spot is None:
            return None
        return longest(root.spot.follow(history), history)

    def give(
        self,
        parent: Node,
        tokens: Iterable[int],
        messages: Sequence[Message],
        *,
        canonical: Canonical | None = None,
        fork: Fork = "",
    ) -> Node:
        """Add the tokens of messages that no path has yet. An array of ids is kept as it is, not copied."""
        node = Node(next(self._numbers), "given", parent)
        node.tokens = tokens if isinstance(tokens, array) else array("i", tokens)
        node.canonical = canonical
        node.fork = fork
        node._represent(tuple(messages))
        parent.children.append(node)
        return node

    def sample(
        self, given: Node, temperature: float, call: str = "", agent: str = "", *, constrained: bool = False
    ) -> Node:
        """Begin an answer below `given`, drawn at a `temperature` (0: not by temperature alone), for a `call`.
        `constrained`: under a grammar."""
        node = Node(next(self._numbers), "sampled", given)
        node.call = call
        node.agent = agent
        node.temperature = temperature
        node.constrained = constrained
        given.children.append(node)
        if call:
            self.calls.setdefault(answer_id(call), []).append(node)
        return node

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            if node.kind != "root":
                yield node
            stack.extend(reversed(node.children))

    def leaves(self) -> list[Node]:
        """The answers that no other answer builds on, in the order in which they were begun."""
        found: list[Node] = []
        continued: set[Node | None] = set()
        for node in sorted(self.nodes(), key=lambda node: -node.id):
            if node in continued:
                continued.add(node.parent)
            elif node.kind == "sampled" and node.usable and node.tokens:
                found.append(node)
                continued.add(node.parent)
        found.reverse()
        return found


def answer_id(call: str) -> str:
    """The id of the call that a node's `call` names, without the number of its choice."""
    return call.rpartition("_")[0] or call

"""The token tree of one policy in one session.

A node holds only the tokens that it adds. A *given* node holds the rendered messages of a call that no node before
it represents, and the generation prompt; a *sampled* node below it holds what the engine returned, id for id. The
prompt of a call is the concatenation of the path to its given node, so what the model sampled is never tokenised
again: later calls carry the very ids. The same prompt sampled several times gives sibling sampled nodes.

Invariants: a sampled node's parent is a given node; a given node's parent is a sampled node, a given node or a
root; nodes are numbered in the order in which they were made; an abandoned node has no children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rillflow.gateway.messages import Message
from rillflow.types import Chunk, FinishReason

Kind = Literal["root", "given", "sampled"]
Fork = Literal["", "history", "template"]


class Canonical(NamedTuple):
    """The template's own text of a path, by length and hash: how a template that rewrites history is caught."""

    length: int
    digest: bytes


class Node:
    """One piece of the tree. `finish` is None while the engine still samples it."""

    __slots__ = (
        "abandoned",
        "call",
        "canonical",
        "children",
        "finish",
        "fork",
        "id",
        "kind",
        "logprobs",
        "messages",
        "parent",
        "raw_logprobs",
        "temperature",
        "tokens",
        "versions",
    )

    def __init__(self, id: int, kind: Kind, parent: Node | None) -> None:
        self.id = id
        self.kind = kind
        self.parent = parent
        self.children: list[Node] = []
        self.messages: tuple[Message, ...] = ()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.versions: list[int] = []
        self.temperature = 0.0
        self.finish: FinishReason | None = None
        self.abandoned = False
        self.call = ""
        self.fork: Fork = ""
        self.canonical: Canonical | None = None

    def add(self, chunk: Chunk) -> None:
        """Keep what the engine sampled, as it said it."""
        self.tokens.extend(chunk.tokens)
        self.logprobs.extend(chunk.logprobs)
        self.raw_logprobs.extend(chunk.raw_logprobs)
        self.versions.extend([chunk.version] * len(chunk.tokens))

    def end(self, finish: FinishReason, said: Message) -> None:
        """Sampling has ended; `said` is the message that the agent is shown for these tokens."""
        self.finish = finish
        self.messages = (said,)

    def abandon(self) -> None:
        """Nobody saw these tokens: nothing extends them and nothing trains on them. Without any, the node goes.

        A node that a later call extends was seen: it stays as it is.
        """
        if self.children:
            return
        self.abandoned = True
        if not self.tokens and self.parent is not None and self in self.parent.children:
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
        ids: list[int] = []
        for node in self.path():
            ids.extend(node.tokens)
        return ids


class Match(NamedTuple):
    """The path that represents the first `covered` messages of a history."""

    node: Node
    covered: int


class TokenTree:
    """All paths of one policy. Histories that were rendered with other tools never share a path."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._made = 0

    def root(self, tools: bytes) -> Node:
        if tools not in self._roots:
            self._roots[tools] = self._make("root", None)
        return self._roots[tools]

    def match(self, tools: bytes, history: Sequence[Message]) -> Match:
        """The longest path, of all in the tree, that `history` begins with and that can be extended.

        Among equally long ones: the one whose tool-call ids are the history's, then the one sampled rather than
        given, then the oldest.
        """
        best = Match(self.root(tools), 0)
        best_rank = (0, 0, 0, 0)
        stack = [(best.node, 0, 0)]
        while stack:
            node, covered, exact = stack.pop()
            if _extendable(node, covered, history):
                rank = (covered, exact, int(node.kind == "sampled"), -node.id)
                if rank > best_rank:
                    best, best_rank = Match(node, covered), rank
            for child in node.children:
                if child.usable and _represents(child, history, covered):
                    same = child.kind == "sampled" and _same_calls(child, history[covered])
                    stack.append((child, covered + len(child.messages), exact + same))
        return best

    def give(
        self,
        parent: Node,
        tokens: list[int],
        messages: Sequence[Message],
        *,
        canonical: Canonical | None = None,
        fork: Fork = "",
    ) -> Node:
        """Add the tokens of messages that no path has yet."""
        node = self._make("given", parent)
        node.tokens = tokens
        node.messages = tuple(messages)
        node.canonical = canonical
        node.fork = fork
        parent.children.append(node)
        return node

    def sample(self, given: Node, temperature: float, call: str = "") -> Node:
        """Begin an answer below `given`, drawn at a `temperature` (0: not by temperature alone), for a `call`."""
        node = self._make("sampled", given)
        node.call = call
        node.temperature = temperature
        given.children.append(node)
        return node

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            if node.kind != "root":
                yield node
            stack.extend(reversed(node.children))

    def _make(self, kind: Kind, parent: Node | None) -> Node:
        node = Node(self._made, kind, parent)
        self._made += 1
        return node


def _represents(node: Node, history: Sequence[Message], start: int) -> bool:
    messages = node.messages
    if len(history) - start < len(messages):
        return False
    return all(mine.key == history[start + offset].key for offset, mine in enumerate(messages))


def _same_calls(node: Node, said: Message) -> bool:
    return bool(said.call_ids) and said.call_ids == node.messages[0].call_ids


def _extendable(node: Node, covered: int, history: Sequence[Message]) -> bool:
    """A given node ends with the generation prompt: only an answer, or nothing, can follow it."""
    if node.kind != "given":
        return True
    return covered == len(history) or history[covered].role == "assistant"

"""The token tree of one policy in one session, and the index in which a history finds its path.

A node holds only the tokens that it adds. A *given* node holds the rendered messages of a call that no node above it
represents, and the generation prompt. A *sampled* node below it holds what the engine returned, id for id. The prompt
of a call is the concatenation of the path to its given node, so sampled text is never tokenised again: later calls have
the same ids. The same prompt sampled several times gives sibling sampled nodes.

Invariants: a sampled node's parent is a given node. A given node's parent is a sampled node, a given node or a root.
Nodes are numbered in the order in which they were made, over all trees of a session. An abandoned node has no children.
Within a node the versions rise; they may fall only where a restarted trainer moved the head back to an older lineage.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

from rillflow.engine.experts import tail
from rillflow.gateway.trees.messages import Message
from rillflow.types import Chunk, FinishReason

Kind = Literal["root", "given", "sampled"]
Fork = Literal["", "history", "template"]

RAW = b"raw"  # the key of the root of raw prompts; other roots have a key of tools (JSON, or empty)
_NO_INTS, _NO_FLOATS = array("i"), array("f")


class Canonical(NamedTuple):
    """The template's text of a path, by length and hash. It shows whether a template rewrites history."""

    length: int
    digest: bytes


class Seam(NamedTuple):
    """Sampling was interrupted after the first `offset` tokens of a node and continued; `cause` says why."""

    offset: int
    cause: str


class Node:
    """One node of the tree. `finish` is None while the engine samples it. Only sampled nodes grow.

    `call` is the id of its answer with the number of the choice: `{id}_{choice}`. `agent` is the name of the agent that
    made the call, if the call gave one. `constrained`: it was sampled under a grammar. `experts` (`engine.experts`) are
    those that a mixture chose for the path's tokens, from the last token of the answer before it to the last but one of
    this node. `indexed` is its entry in the index of histories.
    """

    __slots__ = (
        "abandoned",
        "agent",
        "call",
        "canonical",
        "children",
        "constrained",
        "experts",
        "finish",
        "fork",
        "id",
        "indexed",
        "kind",
        "logprobs",
        "messages",
        "parent",
        "raw_logprobs",
        "seams",
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
        # Compact arrays: a session's tokens stay in memory until it ends.
        self.tokens = array("i") if sampled else _NO_INTS
        self.logprobs = array("f") if sampled else _NO_FLOATS
        self.raw_logprobs = array("f") if sampled else _NO_FLOATS
        self.versions = array("i") if sampled else _NO_INTS
        self.seams: tuple[Seam, ...] = ()
        self.temperature = 0.0
        self.constrained = False
        self.experts = b""
        self.finish: FinishReason | None = None
        self.abandoned = False
        self.call = ""
        self.agent = ""
        self.fork: Fork = ""
        self.canonical: Canonical | None = None
        self.indexed: HistoryIndex | None = None

    def add(self, chunk: Chunk) -> None:
        """Append what the engine sampled."""
        if chunk.seam:
            self.seams += (Seam(len(self.tokens), chunk.seam),)
        elif self.versions and chunk.tokens and self.versions[-1] != chunk.version:
            self.seams += (Seam(len(self.tokens), "weights"),)
        self.tokens.fromlist(chunk.tokens)
        self.logprobs.fromlist(chunk.logprobs)
        self.raw_logprobs.fromlist(chunk.raw_logprobs)
        self.versions.extend([chunk.version] * len(chunk.tokens))
        if chunk.experts:
            self.experts = tail(chunk.experts, self._known_experts())

    def _known_experts(self) -> int:
        """Return how many tokens of the path have their experts in an earlier answer: all of it but its last token."""
        path = self.path()
        last = max((at for at, node in enumerate(path) if node is not self and node.experts), default=-1)
        return max(sum(len(node.tokens) for node in path[: last + 1]) - 1, 0)

    def end(self, finish: FinishReason, said: Message) -> None:
        """End the answer. `said` is the message that the agent is shown for these tokens."""
        self.finish = finish
        self._represent((said,))

    def abandon(self) -> None:
        """Mark an answer that no agent saw: nothing extends it and nothing trains on it. An empty node is removed.

        A node that a later call extends was seen, so it stays as it is.
        """
        if self.children or self.abandoned:
            return
        self.abandoned = True
        if self.indexed is not None:
            self.indexed.nodes.remove(self)
        if not self.tokens and self.parent is not None:
            self.parent.children.remove(self)

    @property
    def usable(self) -> bool:
        """True if an agent may continue from here."""
        return self.kind != "sampled" or (self.finish is not None and not self.abandoned)

    def path(self) -> list[Node]:
        """Return the nodes from below the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.kind != "root":
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def prompt(self) -> list[int]:
        """Return all ids of the path that ends here."""
        return self.ids().tolist()

    def ids(self) -> array[int]:
        """Return `prompt` as an array."""
        ids = array("i")
        for node in self.path():
            ids += node.tokens
        return ids

    def _represent(self, messages: tuple[Message, ...]) -> None:
        """Add the node to the index: a history with `messages` after those of the parent is found here from now on."""
        self.messages = messages
        if self.parent is not None and self.parent.indexed is not None and not self.abandoned:
            self.indexed = self.parent.indexed.entry(messages)
            self.indexed.nodes.append(self)


class TokenTree:
    """All paths of one policy. Histories that were rendered with different tools never share a path.

    `numbers` numbers the nodes; the trees of one session share it. `calls` are the answers by the id of their call.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._roots: dict[bytes, Node] = {}
        self._numbers = count() if numbers is None else numbers
        self.calls: dict[str, list[Node]] = {}

    def root(self, tools: bytes) -> Node:
        if tools not in self._roots:
            root = self._roots[tools] = Node(next(self._numbers), "root", None)
            root.indexed = HistoryIndex()
        return self._roots[tools]

    @property
    def empty(self) -> bool:
        return not any(root.children for root in self._roots.values())

    def roots(self) -> dict[bytes, Node]:
        """Return the roots by the key of their tools; raw prompts have the key `RAW`."""
        return dict(self._roots)

    def match(self, tools: bytes, history: Sequence[Message]) -> Match | None:
        """Return the longest path that `history` continues or repeats; see `longest`."""
        root = self._roots.get(tools)
        if root is None or root.indexed is None:
            return None
        return longest(root.indexed.walk(history), history)

    def give(
        self,
        parent: Node,
        tokens: Iterable[int],
        messages: Sequence[Message],
        *,
        canonical: Canonical | None = None,
        fork: Fork = "",
    ) -> Node:
        """Add the tokens of messages that no path has yet. An array of ids is kept, not copied."""
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
        """Begin an answer of `call` below `given`.

        `temperature` is 0 if it alone does not explain the log-probs. `constrained`: it is sampled under a grammar.
        """
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
        """Yield every node except the roots, parents before their children."""
        stack = list(reversed(self._roots.values()))
        while stack:
            node = stack.pop()
            if node.kind != "root":
                yield node
            stack.extend(reversed(node.children))

    def leaves(self) -> list[Node]:
        """Return the answers that no other answer builds on, in the order in which they were begun."""
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
    """Return the id of the call that a node's `call` names, without the number of its choice."""
    return call.rpartition("_")[0] or call


# ---------------------------------------------------------------- the index of histories


class HistoryIndex:
    """One entry of a trie of messages: the nodes whose path has exactly the messages that lead here.

    Every usable node is in the entry of its path's messages. A history is followed from the root's entry with one
    lookup for each message, however many branches the tree has.
    """

    __slots__ = ("children", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.children: dict[bytes, HistoryIndex] = {}

    def entry(self, messages: Iterable[Message]) -> HistoryIndex:
        """Return the entry after `messages`; it is made if it does not exist."""
        entry = self
        for message in messages:
            found = entry.children.get(message.key)
            if found is None:
                found = entry.children[message.key] = HistoryIndex()
            entry = found
        return entry

    def walk(self, history: Sequence[Message]) -> list[HistoryIndex]:
        """Return the entries after the first message, the first two, and so on, as far as they exist."""
        entries: list[HistoryIndex] = []
        entry: HistoryIndex = self
        for message in history:
            found = entry.children.get(message.key) or entry.without_name(message)
            if found is None:
                break
            entries.append(found)
            entry = found
        return entries

    def without_name(self, message: Message) -> HistoryIndex | None:
        """Return the entry after one more message whose name does not count: the agent gave it to a sampled answer."""
        found = self.children.get(message.unnamed) if message.unnamed else None
        return found if found is not None and any(node.kind == "sampled" for node in found.nodes) else None


class Match(NamedTuple):
    """The node whose path represents the first `covered` messages of a history."""

    node: Node
    covered: int


def longest(entries: Sequence[HistoryIndex], history: Sequence[Message]) -> Match | None:
    """Return the longest path that `history`, which leads over `entries`, continues or repeats; None if no path does.

    Among equally long ones, the order is: the one with most of the history's tool-call ids and reasoning, a prompt for
    the very same history, an answer, the oldest.
    """
    twins = any([len(entry.nodes) > 1 for entry in entries])
    plain = not twins and not any([message.reasoning for message in history[: len(entries)]])
    likeness = None if plain else _Likeness(entries, history)
    for covered in range(len(entries), 0, -1):
        node = _best(entries[covered - 1].nodes, covered, history, likeness)
        if node is not None:
            return Match(node, covered)
    return None


def _best(nodes: Sequence[Node], covered: int, history: Sequence[Message], likeness: _Likeness | None) -> Node | None:
    asked = covered == len(history)
    # A given node ends with the generation prompt, so only an answer can follow it.
    able = [node for node in nodes if node.kind != "given" or asked or history[covered].role == "assistant"]
    if likeness is None or not able:
        return able[0] if able else None
    wanted = "given" if asked else "sampled"
    ranked = [(likeness.of(node, covered), node.kind == wanted, -node.id, node) for node in able]
    like, _, _, node = max(ranked, key=lambda rank: rank[:3])
    return node if like >= 0 else None


class _Likeness:
    """How well a path fits a history beyond the keys of its messages.

    A message with the history's tool-call ids or reasoning counts one. A path does not fit (-1) if it has a different
    reasoning, or if another node of the same entry has the tool-call ids: an answer that was sampled twice with the
    same text has two paths, each with its own continuation.
    """

    def __init__(self, entries: Sequence[HistoryIndex], history: Sequence[Message]) -> None:
        self._entries = entries
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
        twins = (twin.messages for twin in self._entries[place].nodes if twin.kind == "sampled")
        return -1 if any(said[0].call_ids == theirs.call_ids for said in twins) else like

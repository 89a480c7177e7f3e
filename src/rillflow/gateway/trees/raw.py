"""Prompts that are no messages (the completions dialect): text or ids, matched with earlier raw paths of the tree.

Text that was sampled keeps its ids: only what follows it is tokenised. A prompt that repeats an answer without the
stop token that ended it cannot lie behind that answer; it is given the answer's ids again, less the last, as tokens
that do not train.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from rillflow.gateway.failures import CallRefused
from rillflow.gateway.trees.messages import message
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.tree import RAW, Node, TokenTree


class _Cut(NamedTuple):
    """A prompt's first `at` ids, or characters, are those of the path to `node` and of `copied` behind it."""

    at: int
    node: Node
    copied: array[int]


class _Added(NamedTuple):
    """What is to be added behind `parent` (None: the root)."""

    parent: Node | None
    ids: array[int]
    text: str


class RawPlace:
    """The place of one raw prompt; as `placing.Place`, of a history."""

    def __init__(self, tree: TokenTree, renderer: Renderer, prompt: str | list[int]) -> None:
        self._tree = tree
        self._renderer = renderer
        self._prompt = prompt
        self._added: _Added | None = None
        self._cut = _longest(self._cuts(prompt), len(prompt))

    def _cuts(self, prompt: str | list[int]) -> Iterator[_Cut]:
        renderer = self._renderer
        if isinstance(prompt, str):
            return _cuts_of_text(self._tree.root(RAW), renderer, prompt, renderer.opening(prompt))
        if not prompt or not all(0 <= id < renderer.vocabulary for id in prompt):
            raise CallRefused(f"a prompt of ids has some, each from 0 to {renderer.vocabulary - 1}", param="prompt")
        return _cuts_of_ids(self._tree.root(RAW), array("i", prompt))

    @property
    def size(self) -> int:
        return len(self._prompt)

    @property
    def stands(self) -> bool:
        return self._cut is None or self._cut.node.usable

    def render(self) -> None:
        if self._known() is None:
            self._addition()

    def give(self) -> Node:
        """Return the given node whose path is the prompt; made if no call has asked the same before."""
        known = self._known()
        if known is not None:
            return known
        parent, ids, text = self._addition()
        alone = self._tree.empty if parent is None else not parent.children
        messages = [message("prompt", text)] if ids else []
        return self._tree.give(parent or self._tree.root(RAW), ids, messages, fork="" if alone else "history")

    def _known(self) -> Node | None:
        """The node that is the prompt already."""
        cut = self._cut
        if cut is None or cut.node.kind != "given" or cut.copied or cut.at < len(self._prompt):
            return None
        return cut.node

    def _addition(self) -> _Added:
        if self._added is None:
            self._added = self._of_text(self._prompt) if isinstance(self._prompt, str) else self._of_ids(self._prompt)
        return self._added

    def _of_ids(self, prompt: list[int]) -> _Added:
        ids = array("i", prompt)
        rest = ids[self._cut.at :] if self._cut else ids
        return _Added(self._cut.node if self._cut else None, rest, self._renderer.decode(rest))

    def _of_text(self, prompt: str) -> _Added:
        cut, renderer, opening = self._cut, self._renderer, self._renderer.opening(prompt)
        if cut is not None:
            rest = cut.copied + renderer.ids(prompt[cut.at :])
            ids = [*cut.node.prompt(), *rest]
            # A tokenizer may write what it takes for the beginning of a text differently.
            if renderer.decode(ids[len(opening) :]) == prompt:
                return _Added(cut.node, rest, renderer.decode(rest))
        whole = array("i", opening) + renderer.ids(prompt)
        if not whole:
            raise CallRefused("a prompt needs at least one token", param="prompt")
        return _Added(None, whole, prompt)


def _longest(cuts: Iterator[_Cut], whole: int) -> _Cut | None:
    """The longest; among equals a node that ends the prompt rather than one that it follows, then the oldest."""
    return max(
        cuts,
        key=lambda cut: (cut.at, not cut.copied, (cut.node.kind == "given") == (cut.at == whole), -cut.node.id),
        default=None,
    )


def _cuts_of_ids(root: Node, ids: array[int]) -> Iterator[_Cut]:
    stack = [(root, 0)]
    while stack:
        node, at = stack.pop()
        for child in node.children:
            end = at + len(child.tokens)
            if child.usable and ids[at:end] == child.tokens:
                yield _Cut(end, child, array("i"))
                stack.append((child, end))


def _cuts_of_text(root: Node, renderer: Renderer, prompt: str, opening: list[int]) -> Iterator[_Cut]:
    """Behind what was sampled, or at the end: text between two pieces of given text is tokenised in one piece.

    Prompts of ids may have the same text without its `opening`: those are others.
    """
    opened = array("i", opening)
    stack = [(root, 0)]
    while stack:
        node, at = stack.pop()
        for child in node.children:
            if not child.usable or not prompt.startswith(_shown(child), at):
                continue
            if node is root and child.tokens[: len(opened)] != opened:
                continue
            text = _shown(child) if child.kind == "given" else renderer.decode(child.tokens)
            end = at + len(text)
            if prompt.startswith(text, at):
                if child.kind == "sampled" or end == len(prompt):
                    yield _Cut(end, child, array("i"))
                stack.append((child, end))
            elif child.tokens[-1] in renderer.stop_tokens:
                kept = child.tokens[:-1]
                text = renderer.decode(kept)
                if kept and prompt.startswith(text, at):
                    yield _Cut(at + len(text), node, kept)


def _shown(node: Node) -> str:
    """The node's text as the agent knows it."""
    return "".join(str(said.body["content"]) for said in node.messages)

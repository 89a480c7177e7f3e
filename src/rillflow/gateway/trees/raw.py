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


def place_raw(tree: TokenTree, renderer: Renderer, prompt: str | list[int]) -> Node:
    """The given node whose path is the prompt; made if no call has asked the same before."""
    if isinstance(prompt, str):
        return _place_text(tree, renderer, prompt)
    if not prompt or not all(0 <= id < renderer.vocabulary for id in prompt):
        raise CallRefused(f"a prompt of ids has some, each from 0 to {renderer.vocabulary - 1}", param="prompt")
    ids = array("i", prompt)
    cut = _longest(_cuts_of_ids(tree.root(RAW), ids), len(ids))
    if cut is not None and cut.node.kind == "given" and cut.at == len(ids):
        return cut.node
    return _give(tree, renderer, cut, ids[cut.at :] if cut else ids)


def _place_text(tree: TokenTree, renderer: Renderer, prompt: str) -> Node:
    opening = renderer.opening(prompt)
    cut = _longest(_cuts_of_text(tree.root(RAW), renderer, prompt, opening), len(prompt))
    if cut is not None and cut.node.kind == "given" and not cut.copied:
        return cut.node
    if cut is not None:
        rest = cut.copied + array("i", renderer.encode(prompt[cut.at :]))
        ids = [*cut.node.prompt(), *rest]
        # A tokenizer may write what it takes for the beginning of a text differently.
        if renderer.decode(ids[len(opening) :]) == prompt:
            return _give(tree, renderer, cut, rest)
    ids = [*opening, *renderer.encode(prompt)]
    if not ids:
        raise CallRefused("a prompt needs at least one token", param="prompt")
    return _give(tree, renderer, None, array("i", ids), prompt)


def _give(tree: TokenTree, renderer: Renderer, cut: _Cut | None, ids: array[int], text: str | None = None) -> Node:
    alone = tree.empty if cut is None else not cut.node.children
    parent = tree.root(RAW) if cut is None else cut.node
    said = renderer.decode(ids) if text is None else text
    messages = [message("prompt", said)] if ids else []
    return tree.give(parent, ids, messages, fork="" if alone else "history")


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

"""Where in a token tree a call belongs: the longest matching path, extended by what it does not yet hold.

Messages of a matched path are rendered as they are stored, not as the agent repeats them: it may have left out their
reasoning, or added a name. Raw prompts have paths of their own, which no history of messages is matched with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.raw import place_raw
from rillflow.gateway.trees.render import Rendered, Renderer, Tools
from rillflow.gateway.trees.spots import Match
from rillflow.gateway.trees.tree import Fork, Node, TokenTree

__all__ = ["count", "place", "place_raw"]


class _Place(NamedTuple):
    """Behind `parent` (None: a root), with what is to be added there; nothing is where `parent` is the prompt."""

    parent: Node | None
    rendered: Rendered | None = None
    messages: Sequence[Message] = ()
    fork: Fork = ""


def place(tree: TokenTree, renderer: Renderer, history: Sequence[Message], tools: Tools, tools_key: bytes) -> Node:
    """The given node whose path is the prompt for `history`; made if no call has asked the same before."""
    parent, rendered, messages, fork = _find(tree, renderer, history, tools, tools_key)
    if parent is None:
        fork = fork or ("" if tree.empty else "history")
        parent = tree.root(tools_key)
    if rendered is None:
        return parent
    return tree.give(parent, rendered.tokens, messages, canonical=rendered.canonical, fork=fork)


def count(tree: TokenTree, renderer: Renderer, history: Sequence[Message], tools: Tools, tools_key: bytes) -> int:
    """How many ids the prompt for `history` would have; the tree stays as it is."""
    found = _find(tree, renderer, history, tools, tools_key)
    stored = 0 if found.parent is None else sum(len(node.tokens) for node in found.parent.path())
    return stored + (0 if found.rendered is None else len(found.rendered.tokens))


def _find(tree: TokenTree, renderer: Renderer, history: Sequence[Message], tools: Tools, tools_key: bytes) -> _Place:
    match = tree.match(tools_key, history)
    if match is None:
        return _Place(None, renderer.first(history, tools, tools_key), history)
    node, covered = match
    if node.kind == "given" and covered == len(history):
        return _Place(node)
    if not renderer.append_only:
        history = [*_stored(node), *history[covered:]]
    rendered = _extension(renderer, history, tools, match)
    if rendered is not None:
        return _Place(node, rendered, history[covered:], "history" if node.children else "")
    if renderer.append_only:
        history = [*_stored(node), *history[covered:]]
        return _Place(None, renderer.first(history, tools, tools_key), history, "template")
    return _rewritten(renderer, history, tools, node)


def _extension(renderer: Renderer, history: Sequence[Message], tools: Tools, match: Match) -> Rendered | None:
    """What follows the matched path; None where the template writes that path differently now."""
    node, covered = match
    if node.kind == "given":
        return renderer.after_prompt(history[covered:]) if renderer.append_only else None
    last = node.tokens[-1] if node.tokens else None
    before = node.parent.canonical if node.parent is not None else None
    return renderer.after_answer(history, covered, tools, last_token=last, before=before)


def _rewritten(renderer: Renderer, history: Sequence[Message], tools: Tools, node: Node) -> _Place:
    """Behind the last prompt on the way to `node` that the template still writes as it did."""
    known = {given: given.canonical for given in node.path() if given.kind == "given" and given.canonical is not None}
    if node.kind == "given" and node not in known:
        known[node] = renderer.canonical(_stored(node), tools)
    kept, rendered = renderer.after_prompts(history, tools, list(known.values()))
    if kept == 0:
        return _Place(None, rendered, history, "template")
    parent = list(known)[kept - 1]
    fork: Fork = "template" if parent is not node else ("history" if node.children else "")
    return _Place(parent, rendered, history[len(_stored(parent)) :], fork)


def _stored(node: Node) -> list[Message]:
    return [message for above in node.path() for message in above.messages]

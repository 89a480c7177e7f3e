"""Where in a token tree a call belongs: the longest matching path, extended by what it does not yet hold."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.gateway.messages import Message
from rillflow.gateway.render import Rendered, Renderer, Tools
from rillflow.gateway.tree import Fork, Match, Node, TokenTree


def place(tree: TokenTree, renderer: Renderer, history: Sequence[Message], tools: Tools, tools_key: bytes) -> Node:
    """The given node whose path is the prompt for `history`; made if no call has asked the same before."""
    match = tree.match(tools_key, history)
    if match.covered == len(history):
        asked = _asked(match.node)
        if asked is not None:
            return asked
    rendered = _extension(renderer, history, tools, match)
    if rendered is not None:
        fork: Fork = "history" if match.node.children else ""
        return _give(tree, match.node, rendered, history[match.covered :], fork)
    rewritten = match.node.kind != "root"
    root = tree.root(tools_key)
    fork = "template" if rewritten else ("history" if root.children else "")
    return _give(tree, root, renderer.first(history, tools, tools_key), history, fork)


def _asked(node: Node) -> Node | None:
    """The given node that asks for an answer to exactly the messages up to `node`, if a call has made it."""
    if node.kind == "given":
        return node
    return next((child for child in node.children if child.kind == "given" and not child.messages), None)


def _give(tree: TokenTree, parent: Node, rendered: Rendered, new: Sequence[Message], fork: Fork) -> Node:
    return tree.give(parent, rendered.tokens, new, canonical=rendered.canonical, fork=fork)


def _extension(renderer: Renderer, history: Sequence[Message], tools: Tools, match: Match) -> Rendered | None:
    """What to add behind the matched path, or None where everything must be rendered anew."""
    node, covered = match
    if node.kind == "root" or node.parent is None:
        return None
    if node.kind == "given":
        return renderer.after_prompt(history, covered, tools, before=node.canonical)
    last = node.tokens[-1] if node.tokens else None
    return renderer.after_answer(history, covered, tools, last_token=last, before=node.parent.canonical)

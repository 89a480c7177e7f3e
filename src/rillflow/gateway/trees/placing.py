"""Where in a token tree a call belongs: the longest matching path, extended by what it does not yet hold.

Messages of a matched path are rendered as they are stored, not as the agent repeats them: it may have left out their
reasoning, or added a name. Raw prompts have paths of their own, which no history of messages is matched with.

Only matching and giving look at what changes in a tree. Rendering reads nodes that stay as they are, so that it may run
in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rillflow.gateway.trees.messages import PLAIN_READING, AnswerReading, Message
from rillflow.gateway.trees.raw import RawPlace
from rillflow.gateway.trees.render import Rendered, Renderer
from rillflow.gateway.trees.spots import Match
from rillflow.gateway.trees.template import Tools
from rillflow.gateway.trees.tree import Fork, Node, TokenTree

__all__ = ["Place", "RawPlace"]


class _Found(NamedTuple):
    """Behind `parent` (None: a root), with what is to be added there; nothing is where `parent` is the prompt."""

    parent: Node | None
    rendered: Rendered | None = None
    messages: Sequence[Message] = ()
    fork: Fork = ""


class Place:
    """The place of one call. It is matched when it is made; `render` may take long and may run in a thread; `give` and
    `count` render what has not been rendered."""

    def __init__(
        self,
        tree: TokenTree,
        renderer: Renderer,
        history: Sequence[Message],
        tools: Tools,
        tools_key: bytes,
        *,
        reading: AnswerReading = PLAIN_READING,
    ) -> None:
        self._tree = tree
        self._renderer = renderer
        self._history = history
        self._tools = tools
        self._tools_key = tools_key
        self._reading = reading
        self._match = tree.match(tools_key, history)
        self._found: _Found | None = None

    @property
    def size(self) -> int:
        """Bytes, about, that `render` goes over."""
        covered = self._match.covered if self._match is not None and self._renderer.append_only else 0
        tools = 0 if covered else len(self._tools_key)
        return tools + sum(message.size for message in self._history[covered:])

    @property
    def stands(self) -> bool:
        """Whether the path that was matched is still there: its answer may have been abandoned since."""
        return self._match is None or self._match.node.usable

    def render(self) -> None:
        self._rendered()

    def give(self) -> Node:
        """Return the given node whose path is the prompt; made if no call has asked the same before."""
        parent, rendered, messages, fork = self._rendered()
        if parent is None:
            fork = fork or ("" if self._tree.empty else "history")
            parent = self._tree.root(self._tools_key)
        if rendered is None:
            return parent
        return self._tree.give(parent, rendered.tokens, messages, canonical=rendered.canonical, fork=fork)

    def count(self) -> int:
        """Return how many ids the prompt would have; the tree stays as it is."""
        found = self._rendered()
        stored = 0 if found.parent is None else sum(len(node.tokens) for node in found.parent.path())
        return stored + (0 if found.rendered is None else len(found.rendered.tokens))

    def _rendered(self) -> _Found:
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> _Found:
        renderer, history, match = self._renderer, self._history, self._match
        if match is None:
            return _Found(None, renderer.first(history, self._tools, self._tools_key), history)
        node, covered = match
        if node.kind == "given" and covered == len(history):
            return _Found(node)
        history = [*_stored(node), *history[covered:]]
        rendered = self._extension(history, match)
        if rendered is not None:
            return _Found(node, rendered, history[covered:], "history" if node.children else "")
        return _rewritten(renderer, history, self._tools, node)

    def _extension(self, history: Sequence[Message], match: Match) -> Rendered | None:
        """What follows the matched path; None where the template writes that path differently now."""
        node, covered = match
        if node.kind == "given":
            return self._renderer.after_prompt(history[covered:]) if self._renderer.append_only else None
        before = node.parent.canonical if node.parent is not None else None
        return self._renderer.after_answer(
            history, covered, self._tools, said=node.tokens, before=before, reading=self._reading
        )


def _rewritten(renderer: Renderer, history: Sequence[Message], tools: Tools, node: Node) -> _Found:
    """Behind the last prompt on the way to `node` that the template still writes as it did."""
    known = {given: given.canonical for given in node.path() if given.kind == "given" and given.canonical is not None}
    if node.kind == "given" and node not in known:
        known[node] = renderer.canonical(_stored(node), tools)
    kept, rendered = renderer.after_prompts(history, tools, list(known.values()))
    if kept == 0:
        return _Found(None, rendered, history, "template")
    parent = list(known)[kept - 1]
    fork: Fork = "template" if parent is not node else ("history" if node.children else "")
    return _Found(parent, rendered, history[len(_stored(parent)) :], fork)


def _stored(node: Node) -> list[Message]:
    return [message for above in node.path() for message in above.messages]

"""Where in a token tree a call belongs: the longest matching path, extended by what it does not hold yet.

A call has a history of messages or a raw prompt (the completions dialect). Messages of a matched path are rendered as
they are stored, not as the agent repeats them: the agent may have left out their reasoning, or added a name. Raw
prompts have their own paths, which no history of messages matches.

Only matching and `give` depend on the state of the tree. `render` reads nodes that never change, so that it may run in
a thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rillflow.gateway.shapes import CallRefused
from rillflow.gateway.trees.messages import INSTRUCTIONS, PLAIN_READING, AnswerReading, Message, message
from rillflow.gateway.trees.render import Rendered, Renderer
from rillflow.gateway.trees.template import Tools
from rillflow.gateway.trees.tree import RAW, Fork, Match, Node, TokenTree

# ---------------------------------------------------------------- a history of messages


class _Found(NamedTuple):
    """The node `parent` (None: a root) and what follows it; `rendered` is None if `parent` is the prompt itself."""

    parent: Node | None
    rendered: Rendered | None = None
    messages: Sequence[Message] = ()
    fork: Fork = ""


class Place:
    """The place of one call with a history. The constructor matches it.

    `render` may take long and may run in a thread; `give` and `count` render if `render` was not called.
    """

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
        """The number of bytes that `render` processes, about."""
        covered = self._match.covered if self._match is not None and self._renderer.append_only else 0
        tools = 0 if covered else len(self._tools_key)
        return tools + sum(message.size for message in self._history[covered:])

    @property
    def stands(self) -> bool:
        """False if the matched answer was abandoned meanwhile."""
        return self._match is None or self._match.node.usable

    def render(self) -> None:
        self._rendered()

    def give(self) -> Node:
        """Return the given node whose path is the prompt. It is made unless an earlier call had the same prompt."""
        parent, rendered, messages, fork = self._rendered()
        if parent is None:
            fork = fork or ("" if self._tree.empty else "history")
            parent = self._tree.root(self._tools_key)
        if rendered is None:
            return parent
        return self._tree.give(parent, rendered.tokens, messages, canonical=rendered.canonical, fork=fork)

    def count(self) -> int:
        """Return how many ids the prompt would have. The tree does not change."""
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
        """Return what follows the matched path; None if the template writes that path differently now."""
        node, covered = match
        if node.kind == "given":
            return self._renderer.after_prompt(history[covered:]) if self._renderer.append_only else None
        before = node.parent.canonical if node.parent is not None else None
        return self._renderer.after_answer(
            history, covered, self._tools, said=node.tokens, before=before, reading=self._reading
        )


def _rewritten(renderer: Renderer, history: Sequence[Message], tools: Tools, node: Node) -> _Found:
    """Return the place after the last prompt on the path to `node` that the template still writes as before."""
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


# ---------------------------------------------------------------- a history that names an earlier answer


def following(trees: Mapping[str, TokenTree], answer: str, new: list[Message]) -> list[Message]:
    """Return the whole history of a call that names an earlier answer, as `previous_response_id` does.

    It has the instructions of this call, the messages up to `answer`, and the new messages. The trees hold every
    answer's messages, so nothing else is stored for this.
    """
    told = [message for message in new if INSTRUCTIONS in message.body]
    _, node = answer_of(trees, answer, "previous_response_id")
    return [*told, *_without_instructions(_stored(node)), *_without_instructions(new)]


def _without_instructions(messages: list[Message]) -> list[Message]:
    return [message for message in messages if INSTRUCTIONS not in message.body]


def answer_of(trees: Mapping[str, TokenTree], answer: str, param: str) -> tuple[str, Node]:
    """Return the policy and the node of an answer. `param` is the field of the request that has the answer's id."""
    for policy, tree in trees.items():
        for node in tree.calls.get(answer, ()):
            if node.usable and node.path()[0].parent is not tree.roots().get(RAW):
                return policy, node
    raise CallRefused(
        f"this session has no response with the id 'resp_{answer}'",
        status=404,
        code="previous_response_not_found" if param == "previous_response_id" else "response_not_found",
        param=param,
    )


# ---------------------------------------------------------------- a raw prompt


class _Cut(NamedTuple):
    """The first `at` ids or characters of a prompt are those of the path to `node` and of `copied` after it."""

    at: int
    node: Node
    copied: array[int]


class _Added(NamedTuple):
    """The ids to add after `parent` (None: the root), and their text."""

    parent: Node | None
    ids: array[int]
    text: str


class RawPlace:
    """The place of one raw prompt, text or ids; used like `Place`.

    Sampled text keeps its ids, and only the text after it is tokenised. A prompt that repeats an answer without the
    stop token that ended it cannot extend that answer. It is given the ids of the answer again, without the last one,
    and these copies do not train.
    """

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
            raise CallRefused(
                f"a prompt of ids needs at least one id, each from 0 to {renderer.vocabulary - 1}", param="prompt"
            )
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
        """Return the given node whose path is the prompt. It is made unless an earlier call had the same prompt."""
        known = self._known()
        if known is not None:
            return known
        parent, ids, text = self._addition()
        alone = self._tree.empty if parent is None else not parent.children
        messages = [message("prompt", text)] if ids else []
        return self._tree.give(parent or self._tree.root(RAW), ids, messages, fork="" if alone else "history")

    def _known(self) -> Node | None:
        """Return the node whose path is the prompt already."""
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
            # Some tokenizers encode the beginning of a text differently.
            if renderer.decode(ids[len(opening) :]) == prompt:
                return _Added(cut.node, rest, renderer.decode(rest))
        whole = array("i", opening) + renderer.ids(prompt)
        if not whole:
            raise CallRefused("a prompt needs at least one token", param="prompt")
        return _Added(None, whole, prompt)


def _longest(cuts: Iterator[_Cut], whole: int) -> _Cut | None:
    """Return the longest cut. Among equals, a node that ends the prompt comes before one that it follows; then the
    oldest."""
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
    """Yield the cuts after sampled nodes, and at the end of the prompt.

    Text between two pieces of given text is tokenised in one piece. A prompt of ids with the same text but without the
    `opening` is another prompt.
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
    """Return the text of a node as the agent knows it."""
    return "".join(str(said.body["content"]) for said in node.messages)

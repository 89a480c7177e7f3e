"""Forks of a token tree: the calls whose prompt left every earlier path, and at which message and field they did so.

Each fork is one more sample of its episode, which repeats whatever it shares with the others. An agent that forks at
every call is trained on few tokens of many that are forwarded, so the cause is worth telling.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.tree import RAW, Node, TokenTree, answer_id

_SHOWN = 40  # characters of what differs
_FIELDS = ("content", "name", "tool_calls", "reasoning_content")
_FEWEST = 2  # forks from which on every call of an episode can be said to fork


def forks(tree: TokenTree) -> list[Node]:
    """Return the prompts that left every earlier path and were answered, in the order of their calls."""
    found = [node for node in tree.nodes() if node.fork and any(_answered(child) for child in node.children)]
    return sorted(found, key=lambda node: node.id)


def forks_always(tree: TokenTree) -> bool:
    """Return whether every call of the tree but the first has forked."""
    calls = {answer_id(node.call) for node in tree.nodes() if _answered(node)}
    return len(found := forks(tree)) >= _FEWEST and len(found) >= len(calls) - 1


def cause(tree: TokenTree, fork: Node) -> str:
    """Return why the call of `fork` did not continue the earlier path that it shares most messages with."""
    if fork.fork == "template":
        return _rewritten(tree, fork)
    if fork.path()[0].parent is tree.roots().get(RAW):
        return "the raw prompt does not begin with an earlier prompt and its answer"
    mine, tools = _messages(fork), _tools(tree, fork)
    earlier = [node for node in tree.nodes() if _answered(node) and node.id < fork.id and _tools(tree, node) != RAW]
    if not earlier:
        return "no earlier call was answered"
    other = max(earlier, key=lambda node: (_shared(_messages(node), mine), _tools(tree, node) == tools, node.id))
    theirs = _messages(other)
    at = _shared(theirs, mine)
    if at < min(len(mine), len(theirs)):
        return _difference(at, theirs[at], mine[at])
    if _tools(tree, other) != tools:
        return _other_key(_tools(tree, other), tools)
    shorter = f"the history ends before messages[{at}] of an earlier call"
    return shorter if at == len(mine) else "the history goes on from where an earlier call, which failed, went on"


def _difference(at: int, old: Message, new: Message) -> str:
    where = f"messages[{at}]"
    if old.role != new.role:
        return f"{where} has the role {new.role}, not {old.role}: messages were left out or put in between"
    field = next((field for field in _FIELDS if _text(old, field) != _text(new, field)), "content")
    before, now = _text(old, field), _text(new, field)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))
    shown = f"{now[start : start + _SHOWN]!r} instead of {before[start : start + _SHOWN]!r}"
    what = "the client writes the system prompt anew" if new.role == "system" else f"the {new.role}'s message differs"
    return f"{what}: {field} of {where} differs at character {start}: {shown}"


def _text(message: Message, field: str) -> str:
    """Return a field of a message as text, of tool calls without their ids, which do not count."""
    value: Any = message.body.get(field, "")
    if field == "tool_calls" and value:
        return json.dumps([call["function"] for call in value], sort_keys=True)
    return str(value)


def _answered(node: Node) -> bool:
    return node.kind == "sampled" and node.usable and bool(node.tokens)


def _messages(node: Node) -> list[Message]:
    return [message for above in node.path() for message in above.messages]


def _shared(old: list[Message], new: list[Message]) -> int:
    """Return how many messages, from the first, are the same to the tree."""
    return sum(1 for _ in takewhile(lambda pair: _same(*pair), zip(old, new, strict=False)))


def _same(old: Message, new: Message) -> bool:
    return old.key in (new.key, new.unnamed) and new.reasoning in ("", old.reasoning)


def _tools(tree: TokenTree, node: Node) -> bytes:
    root = node.path()[0].parent
    return next(tools for tools, one in tree.roots().items() if one is root)


def _other_key(before: bytes, now: bytes) -> str:
    if _names(before) == _names(now) and _options(before) != _options(now):
        return f"chat_template_kwargs changed: {_options(now)} instead of {_options(before)}"
    return f"the tool list changed: {_names(now)} instead of {_names(before)}"


def _rewritten(tree: TokenTree, fork: Node) -> str:
    """Return what the chat template writes differently now: the newest answer that the path of `fork` left."""
    kept = set(fork.path())
    history = _messages(fork)
    earlier = [node for node in tree.nodes() if _answered(node) and node.id < fork.id and node not in kept]
    lost = max(earlier, key=lambda node: (_shared(_messages(node), history), node.id), default=None)
    what = "an earlier message"
    if lost is not None:
        (said,), at = lost.messages, len(_messages(lost)) - 1
        what = f"the answer messages[{at}]" + (", of which it leaves out the reasoning" if said.reasoning else "")
    return f"the chat template writes {what} differently now; policies.NAME.history: append keeps what was sampled"


def _names(key: bytes) -> str:
    found = json.loads(key or b"[]")
    tools = found["tools"] if isinstance(found, dict) else found
    names = [tool.get("function", tool).get("name", "") for tool in tools]
    return ", ".join(names) or "no tools"


def _options(key: bytes) -> str:
    found = json.loads(key or b"[]")
    return json.dumps(found["chat_template_kwargs"] if isinstance(found, dict) else {})

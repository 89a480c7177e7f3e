"""Messages in the one form that rendering, matching and transcripts share, whatever dialect they came in.

Two messages are the same when their keys are equal. A key ignores what agents change when they replay a history
without meaning anything by it: tool-call ids, absent against empty content, blank text beside tool calls, the spelling
of the arguments' JSON. It ignores the reasoning too, because most agents leave it out: a message without reasoning is
the same as one with any, one with reasoning only the same as one with that reasoning. A name is part of the key; but
agents name answers after themselves, so `unnamed` finds an answer that was sampled without a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

Body = dict[str, Any]

_object = msgspec.json.Decoder(dict[str, Any])
_DEPTH = 64  # levels of an object: what handles it later takes more of the stack than its parser


class ToolCall(NamedTuple):
    """A call of a tool; `arguments` is JSON text when the model wrote an object, anything else otherwise."""

    id: str
    name: str
    arguments: str

    def body(self) -> Body:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Message(NamedTuple):
    """`body` is what the template sees and the transcript shows; `call_ids` and `reasoning`, less the blank around
    it, tell equal answers apart. `unnamed` is the key that an assistant's message has without its name; empty where it
    has none."""

    role: str
    key: bytes
    body: Body
    call_ids: frozenset[str] = frozenset()
    reasoning: str = ""
    unnamed: bytes = b""

    @property
    def size(self) -> int:
        """Bytes kept of it, about: also of what its key ignores."""
        ids = sum(map(len, self.call_ids)) + len(self.body.get("tool_call_id", ""))
        return len(self.key) + len(self.reasoning) + ids


def message(
    role: str, text: str, calls: Sequence[ToolCall] = (), *, reasoning: str = "", name: str = "", call_id: str = ""
) -> Message:
    body: Body = {"role": role, "content": text}
    if reasoning:
        body["reasoning_content"] = reasoning
    if name:
        body["name"] = name
    if call_id:
        body["tool_call_id"] = call_id
    named = bool(name) and role == "assistant"
    if not calls:
        unnamed = msgspec.json.encode((role, text, "")) if named else b""
        key = msgspec.json.encode((role, text, name))
        return Message(role, key, body, reasoning=reasoning.strip(), unnamed=unnamed)
    parsed = [(call.name, parse_object(call.arguments)) for call in calls]
    # Templates write arguments with `tojson`: given the text, they would quote it a second time.
    body["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _given(call, value)}}
        for call, (_, value) in zip(calls, parsed, strict=True)
    ]
    compared = [
        (called, call.arguments if value is None else _canonical(value))
        for call, (called, value) in zip(calls, parsed, strict=True)
    ]
    shown = text if text.strip() else ""
    key = msgspec.json.encode((role, shown, name, compared), order="sorted")
    unnamed = msgspec.json.encode((role, shown, "", compared), order="sorted") if named else b""
    return Message(role, key, body, frozenset(call.id for call in calls), reasoning.strip(), unnamed)


class AnswerReading(NamedTuple):
    """How the text of an answer becomes a message.

    `read` takes the end of the prompt, the answer's text and whether the answer may hold tool calls. `opening` is the
    marker that opens the reasoning; it is empty for a model that does not reason.
    """

    read: Callable[[str, str, bool], Message]
    opening: str = ""


PLAIN_READING = AnswerReading(lambda prompt, text, calls: message("assistant", text))


def same_words(one: Message, other: Message) -> bool:
    """Return whether two answers say the same: reasoning, text and calls, but for blank text around them and ids."""
    return _words(one) == _words(other)


def _words(said: Message) -> tuple[Any, ...]:
    functions = [call["function"] for call in said.body.get("tool_calls", ())]
    calls = [(function["name"], _canonical(function["arguments"])) for function in functions]
    return said.body["content"].strip(), said.reasoning, calls


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None; one nested deeper than anybody means is none to us."""
    try:
        value = _object.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return value if text.count("{") + text.count("[") <= _DEPTH or _nested(value, _DEPTH) else None


def _nested(value: Any, levels: int) -> bool:
    """Whether it has no more levels than that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(_nested(item, levels - 1) for item in inner)


def dump_object(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _given(call: ToolCall, value: dict[str, Any] | None) -> dict[str, Any] | str:
    return call.arguments if value is None else value


def _canonical(value: Any) -> Any:
    """Numbers as JavaScript would write them back: 1.0 and 1 are the same argument."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value

"""Messages in the one form that rendering, matching and transcripts share, whatever dialect they came in.

Two messages are the same when their keys are equal. A key ignores what agents change when they replay a history
without meaning anything by it: tool-call ids, absent against empty content, the spelling of the arguments' JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

Body = dict[str, Any]

_object = msgspec.json.Decoder(dict[str, Any])


class ToolCall(NamedTuple):
    """A call of a tool; `arguments` is JSON text when the model wrote an object, anything else otherwise."""

    id: str
    name: str
    arguments: str

    def body(self) -> Body:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Message(NamedTuple):
    """`body` is what the template sees and the transcript shows; `call_ids` tell equal answers apart."""

    role: str
    key: bytes
    body: Body
    call_ids: frozenset[str] = frozenset()


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
    if not calls:
        return Message(role, msgspec.json.encode((role, text, reasoning, name)), body)
    parsed = [(call.name, parse_object(call.arguments)) for call in calls]
    # Templates write arguments with `tojson`: given the text, they would quote it a second time.
    body["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _given(call, value)}}
        for call, (_, value) in zip(calls, parsed, strict=True)
    ]
    compared = [
        (name, call.arguments if value is None else _canonical(value))
        for call, (name, value) in zip(calls, parsed, strict=True)
    ]
    key = msgspec.json.encode((role, text, reasoning, name, compared), order="sorted")
    return Message(role, key, body, frozenset(call.id for call in calls))


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None. Depth is the parser's to bound: too deep is not an object to us."""
    try:
        return _object.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


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

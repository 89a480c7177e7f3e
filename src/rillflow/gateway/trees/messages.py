"""Messages in the form that rendering, matching and transcripts share, whatever dialect they came in.

Two messages are the same when their keys are equal. A key ignores what agents change when they repeat a history: ids of
tool calls, absent against empty content, blank text beside tool calls, and the spelling of the arguments' JSON. It
ignores the reasoning too, because most agents leave it out: a message without reasoning matches one with any reasoning,
and a message with reasoning matches only that reasoning. The name is part of the key. Agents name answers after
themselves, so `unnamed` finds an answer that was sampled without a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

Body = dict[str, Any]

REASONING = "reasoning_content"  # the field of a body that holds the reasoning
INSTRUCTIONS = "instructions"  # marks, in the body of a message, instructions for one call only

_object = msgspec.json.Decoder(dict[str, Any])
_DEPTH = 64  # levels of an object: later steps need more stack than the parser


class ToolCall(NamedTuple):
    """A tool call. `arguments` is JSON text if the model wrote an object, and any text otherwise."""

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """A message. `body` is what the template gets and the transcript shows.

    `call_ids` and `reasoning` (stripped) distinguish answers with equal keys. `unnamed` is the key without the name,
    for an assistant's message with a name; else it is empty.
    """

    role: str
    key: bytes
    body: Body
    call_ids: frozenset[str] = frozenset()
    reasoning: str = ""
    unnamed: bytes = b""

    @property
    def size(self) -> int:
        """The bytes that it takes, about, including what its key ignores."""
        ids = sum(map(len, self.call_ids)) + len(self.body.get("tool_call_id", ""))
        return len(self.key) + len(self.reasoning) + ids


def message(
    role: str, text: str, calls: Sequence[ToolCall] = (), *, reasoning: str = "", name: str = "", call_id: str = ""
) -> Message:
    body: Body = {"role": role, "content": text}
    if reasoning:
        body[REASONING] = reasoning
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
    # Templates write arguments with `tojson`, which would quote a text a second time.
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
    """Return whether two answers have the same reasoning, text and calls, apart from blank text at the ends and ids."""
    return _words(one) == _words(other)


def _words(said: Message) -> tuple[Any, ...]:
    functions = [call["function"] for call in said.body.get("tool_calls", ())]
    calls = [(function["name"], _canonical(function["arguments"])) for function in functions]
    return said.body["content"].strip(), said.reasoning, calls


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None if it is anything else or nested too deeply."""
    try:
        value = _object.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return value if text.count("{") + text.count("[") <= _DEPTH or _nested(value, _DEPTH) else None


def _nested(value: Any, levels: int) -> bool:
    """Return whether a value has at most `levels` levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(_nested(item, levels - 1) for item in inner)


def dump_object(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _given(call: ToolCall, value: dict[str, Any] | None) -> dict[str, Any] | str:
    return call.arguments if value is None else value


def _canonical(value: Any) -> Any:
    """Return a value with whole floats as integers, as JavaScript writes them: 1.0 and 1 are the same argument."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value

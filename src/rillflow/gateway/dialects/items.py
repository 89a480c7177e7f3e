"""The items of the responses dialect: those of a request to messages, an answer's to those of a response.

An answer is one message to the model but several items here: its reasoning, its text, each of its calls. Replayed,
they become one message again. Their ids carry the answer's, which tells two answers apart that follow each other
with nothing in between; clients that leave ids out still send those of the calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rillflow.gateway.dialects.openai import Part, joined
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.trees.messages import Message, ToolCall, message

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_OWN_ID = re.compile(r"(?:rs|msg|fc|call)_([0-9a-z]+)_[0-9_]+")


class Item(msgspec.Struct):
    """Any item of a request; which fields count depends on its type. One without a type is a message."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


# ---------------------------------------------------------------- the request


@dataclass(slots=True)
class _Turn:
    """The items of one answer, being collected."""

    answer: str = ""
    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def follows(self, item: Item, answer: str) -> bool:
        """Whether `item`, of `answer` where that is known, belongs to this turn."""
        if self.answer and answer:
            return self.answer == answer
        if item.type == "function_call":
            return True
        return not self.calls and not self.text

    def message(self) -> Message:
        return message("assistant", self.text, self.calls, reasoning=self.reasoning)


def messages_of(items: list[Item]) -> list[Message]:
    said: list[Message] = []
    turn: _Turn | None = None
    for place, item in enumerate(items):
        by_model = item.type in ("reasoning", "function_call") or item.role == "assistant"
        if turn is not None and not (by_model and turn.follows(item, _answer(item))):
            said.append(turn.message())
            turn = None
        if by_model:
            turn = turn or _Turn()
            _collect(turn, item, f"input[{place}]")
        else:
            said.append(_given(item, f"input[{place}]"))
    return [*said, turn.message()] if turn is not None else said


def _answer(item: Item) -> str:
    """The id of the answer that an item of ours was part of; empty where it cannot be told."""
    own = _OWN_ID.fullmatch(item.id or "") or _OWN_ID.fullmatch(item.call_id or "")
    return own[1] if own else ""


def _collect(turn: _Turn, item: Item, param: str) -> None:
    turn.answer = turn.answer or _answer(item)
    if item.type == "message":
        turn.text += joined(item.content, f"{param}.content")
    elif item.type == "reasoning":
        turn.reasoning += joined(item.content or item.summary, f"{param}.content")
    else:
        turn.calls.append(
            ToolCall(
                _needed(item.call_id, f"{param}.call_id"),
                _needed(item.name, f"{param}.name"),
                _needed(item.arguments, f"{param}.arguments"),
            )
        )


def _given(item: Item, param: str) -> Message:
    if item.type == "function_call_output":
        if item.output is None:
            raise CallRefused("a tool's result needs its output", param=f"{param}.output")
        return message(
            "tool", joined(item.output, f"{param}.output"), call_id=_needed(item.call_id, f"{param}.call_id")
        )
    if item.type != "message":
        raise CallRefused(f"items of type {item.type!r} are not understood", param=f"{param}.type")
    role = _ROLES.get(item.role or "")
    if role is None:
        raise CallRefused(f"a message has one of the roles {', '.join(_ROLES)}", param=f"{param}.role")
    return message(role, joined(item.content, f"{param}.content"))


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise CallRefused("a call needs its call_id, name and arguments, a result its call_id", param=param)
    return value


# ---------------------------------------------------------------- the response


def reasoning_item(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": id, "summary": [], "content": content, "status": status}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(id: str, parts: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    return {"type": "message", "id": id, "role": "assistant", "status": status, "content": parts}


def call_item(id: str, call: ToolCall, status: str = "completed") -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": id,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }

"""The items of the responses dialect: a request's to messages, an answer's to items of a response or its events.

An answer is one message for the model but several items here: its reasoning, its text, and each of its calls. When an
agent sends them back, they become one message again. Their ids contain the answer's id, which separates two answers
that follow each other directly; clients that leave out the ids of items still send those of the calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rillflow.gateway.answers import Piece
from rillflow.gateway.dialects.openai import Part, joined, logprob_entries, named_event
from rillflow.gateway.shapes import (
    CallItem,
    CallRefused,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesAnswer,
    Status,
    TokenLogprob,
)
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.render import Renderer

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_OWN_ID = re.compile(r"(?:rs|msg|fc|call)_([0-9a-z]+)_[0-9_]+")


class Item(msgspec.Struct):
    """Any item of a request. Its type decides which fields count; without a type it is a message."""

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
    """The items of one answer while they are collected."""

    answer: str = ""
    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def follows(self, item: Item, answer: str) -> bool:
        """Return whether `item` belongs to this turn. `answer` is the id of its answer, or empty."""
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
    """Return the id of the answer that an item was part of; empty if its ids do not show it."""
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
            raise CallRefused("a tool result needs an output", param=f"{param}.output")
        return message(
            "tool", joined(item.output, f"{param}.output"), call_id=_needed(item.call_id, f"{param}.call_id")
        )
    if item.type != "message":
        raise CallRefused(f"items of type {item.type!r} are not accepted", param=f"{param}.type")
    role = _ROLES.get(item.role or "")
    if role is None:
        raise CallRefused(f"the role of a message must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    return message(role, joined(item.content, f"{param}.content"))


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise CallRefused("a call needs a call_id, a name and arguments, and a result a call_id", param=param)
    return value


# ---------------------------------------------------------------- the response


def reasoning_item(id: str, text: str, status: Status = "completed") -> ReasoningItem:
    return ReasoningItem(id=id, summary=[], content=[ReasoningText(text)] if text else [], status=status)


def text_part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    return OutputText(text=text, annotations=[], logprobs=logprobs)


def message_item(id: str, parts: list[OutputText], status: Status = "completed") -> MessageItem:
    return MessageItem(id=id, role="assistant", status=status, content=parts)


def call_item(id: str, call: ToolCall, status: Status = "completed") -> CallItem:
    return CallItem(id=id, call_id=call.id, name=call.name, arguments=call.arguments, status=status)


# ---------------------------------------------------------------- the events of a stream


class ResponseEvents:
    """Writes pieces as events: items that open, grow and close one after the other, numbered throughout.

    `output` has the items that are closed.
    """

    def __init__(self, answer: str, renderer: Renderer) -> None:
        self.output: list[OutputItem] = []
        self._answer = answer
        self._renderer = renderer
        self._number = 0
        self._open = ""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def life(self, what: str, response: ResponsesAnswer) -> bytes:
        """Return the event that the response itself was created, completed or failed."""
        return self._event(f"response.{what}", response=response)

    def take(self, piece: Piece) -> bytes:
        entries = logprob_entries(piece.tokens, self._renderer)
        if piece.text:
            return self._begin("message") + self._say(piece.text, entries)
        if piece.reasoning:
            return self._begin("reasoning") + self._think(piece.reasoning)
        if piece.call is not None:
            return self._end() + self._call(piece.call)
        cut = piece.finish == "length"
        if not self.output and not self._open:  # an empty answer is an empty message
            return self._begin("message") + self._end("incomplete" if cut else "completed")
        if cut and not self._open:
            self.output[-1].status = "incomplete"
        return self._end("incomplete" if cut else "completed")

    # ------------------------------------------------------------ text and reasoning

    def _begin(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        before = self._end()
        self._open, self._texts, self._logprobs = kind, [], []
        item: OutputItem
        part: OutputText | ReasoningText
        if kind == "message":
            item, part = message_item(self._id("msg"), [], "in_progress"), text_part("", [])
        else:
            item, part = reasoning_item(self._id("rs"), "", "in_progress"), ReasoningText("")
        return (
            before + self._item("added", item) + self._event("response.content_part.added", part=part, **self._here())
        )

    def _say(self, text: str, entries: list[TokenLogprob]) -> bytes:
        self._texts.append(text)
        self._logprobs += entries
        return self._event("response.output_text.delta", delta=text, logprobs=entries, **self._here())

    def _think(self, text: str) -> bytes:
        self._texts.append(text)
        return self._event("response.reasoning_text.delta", delta=text, **self._here())

    def _end(self, status: Status = "completed") -> bytes:
        """Close the open item, if any."""
        if not self._open:
            return b""
        text, here = "".join(self._texts), self._here()
        item: OutputItem
        part: OutputText | ReasoningText
        if self._open == "message":
            part = text_part(text, self._logprobs)
            item = message_item(self._id("msg"), [part], status)
            said = self._event("response.output_text.done", text=text, logprobs=self._logprobs, **here)
        else:
            part = ReasoningText(text)
            item = reasoning_item(self._id("rs"), text, status)
            said = self._event("response.reasoning_text.done", text=text, **here)
        self._open = ""
        return said + self._event("response.content_part.done", part=part, **here) + self._done(item)

    # ------------------------------------------------------------ calls

    def _call(self, call: ToolCall) -> bytes:
        """Return the events of a call: id and name first, then the arguments."""
        id, place = self._id("fc"), len(self.output)
        return b"".join(
            (
                self._item("added", call_item(id, call._replace(arguments=""), "in_progress")),
                self._event(
                    "response.function_call_arguments.delta", item_id=id, output_index=place, delta=call.arguments
                ),
                self._event(
                    "response.function_call_arguments.done",
                    item_id=id,
                    output_index=place,
                    name=call.name,
                    arguments=call.arguments,
                ),
                self._done(call_item(id, call)),
            )
        )

    # ------------------------------------------------------------ events

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._answer}_{len(self.output)}"

    def _here(self) -> dict[str, Any]:
        id = self._id("msg" if self._open == "message" else "rs")
        return {"item_id": id, "output_index": len(self.output), "content_index": 0}

    def _item(self, what: str, item: OutputItem) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self.output), item=item)

    def _done(self, item: OutputItem) -> bytes:
        told = self._item("done", item)
        self.output.append(item)
        return told

    def _event(self, type: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": type, "sequence_number": number} | fields)

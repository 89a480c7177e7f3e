"""What endpoints answer, whole or as a stream of events, in each dialect, as the messages that transcripts show.

For display alone: an answer that is not as its provider writes it is read as far as it goes, and never refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rillflow.gateway.dialects import Dialect, chat, completions, messages, responses
from rillflow.gateway.trees.messages import Message, ToolCall, message

Body = dict[str, Any]
_DATA = b"data:"


@dataclass(frozen=True)
class Said:
    """The choices of an answer, each with why it ended, and the tokens that the endpoint counted, if it did."""

    choices: Sequence[tuple[Message, str]] = ()
    prompt: int | None = None
    sampled: int | None = None


@dataclass
class _Choice:
    """An answer that grows with the events of a stream."""

    text: str = ""
    reasoning: str = ""
    finish: str = ""
    calls: dict[int, Body] = field(default_factory=dict)

    def add_call(self, number: int, *, id: str = "", name: str = "", arguments: str = "") -> None:
        call = self.calls.setdefault(number, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or id
        call["name"] = call["name"] or name
        call["arguments"] += arguments

    def read(self) -> tuple[Message, str]:
        calls = [ToolCall(**self.calls[number]) for number in sorted(self.calls)]
        return message("assistant", self.text, calls, reasoning=self.reasoning), self.finish


def read_whole(dialect: Dialect, data: bytes) -> Said:
    """Return what the body of an answer says."""
    try:
        return _WHOLE[dialect.PATH](msgspec.json.decode(data, type=dict[str, Any]))
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return Said()


def read_stream(dialect: Dialect, data: bytes) -> Said:
    """Return what a stream of server-sent events says."""
    try:
        return _STREAMED[dialect.PATH](_events(data))
    except (KeyError, TypeError, AttributeError):
        return Said()


def _events(data: bytes) -> Iterator[Body]:
    for line in data.splitlines():
        if line.startswith(_DATA):
            try:
                yield msgspec.json.decode(line[len(_DATA) :], type=dict[str, Any])
            except msgspec.MsgspecError:
                continue  # OpenAI's last line, `[DONE]`


# ---------------------------------------------------------------- chat and completions


def _chat(body: Body) -> Said:
    choices = []
    for one in body["choices"]:
        said = _Choice(finish=one.get("finish_reason") or "")
        _grow(said, one["message"])
        choices.append(said.read())
    return Said(choices, *_usage(body, "prompt_tokens", "completion_tokens"))


def _chat_stream(events: Iterator[Body]) -> Said:
    choices: dict[int, _Choice] = {}
    counted: tuple[int | None, int | None] = (None, None)
    for event in events:
        for one in event.get("choices") or ():
            said = choices.setdefault(one["index"], _Choice())
            _grow(said, one["delta"])
            said.finish = one.get("finish_reason") or said.finish
        if event.get("usage"):
            counted = _usage(event, "prompt_tokens", "completion_tokens")
    return Said([choices[index].read() for index in sorted(choices)], *counted)


def _grow(said: _Choice, delta: Body) -> None:
    said.text += delta.get("content") or ""
    said.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
    for number, call in enumerate(delta.get("tool_calls") or ()):
        function = call.get("function") or {}
        said.add_call(
            call.get("index", number),
            id=call.get("id") or "",
            name=function.get("name") or "",
            arguments=function.get("arguments") or "",
        )


def _completions(body: Body) -> Said:
    choices = [(message("assistant", one["text"]), one.get("finish_reason") or "") for one in body["choices"]]
    return Said(choices, *_usage(body, "prompt_tokens", "completion_tokens"))


def _completions_stream(events: Iterator[Body]) -> Said:
    said = _Choice()
    for event in events:
        for one in event.get("choices") or ():
            said.text += one.get("text") or ""
            said.finish = one.get("finish_reason") or said.finish
    return Said([said.read()])


# ---------------------------------------------------------------- responses and messages


def _responses(body: Body) -> Said:
    said = _Choice(finish=body.get("status") or "")
    for number, item in enumerate(body["output"]):
        if item["type"] == "message":
            said.text += "".join(part.get("text", "") for part in item["content"])
        elif item["type"] == "function_call":
            said.add_call(number, id=item["call_id"], name=item["name"], arguments=item["arguments"])
        elif item["type"] == "reasoning":
            said.reasoning += "".join(part.get("text", "") for part in item.get("summary") or ())
    return Said([said.read()], *_usage(body, "input_tokens", "output_tokens"))


def _responses_stream(events: Iterator[Body]) -> Said:
    """The last event has the whole answer."""
    ends = [event["response"] for event in events if event.get("type") in ("response.completed", "response.incomplete")]
    return _responses(ends[-1]) if ends else Said()


def _messages(body: Body) -> Said:
    said = _Choice(finish=body.get("stop_reason") or "")
    for number, block in enumerate(body["content"]):
        _open_block(said, number, block)
        if block["type"] == "tool_use":
            said.add_call(number, arguments=json.dumps(block["input"]))
    return Said([said.read()], *_usage(body, "input_tokens", "output_tokens"))


def _messages_stream(events: Iterator[Body]) -> Said:
    said = _Choice()
    for event in events:
        if event.get("type") == "content_block_start":
            _open_block(said, event["index"], event["content_block"])
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            said.text += delta.get("text", "")
            said.reasoning += delta.get("thinking", "")
            if "partial_json" in delta:
                said.add_call(event["index"], arguments=delta["partial_json"])
        elif event.get("type") == "message_delta":
            said.finish = event["delta"].get("stop_reason") or said.finish
    return Said([said.read()])


def _open_block(said: _Choice, number: int, block: Body) -> None:
    said.text += block.get("text", "")
    said.reasoning += block.get("thinking", "")
    if block["type"] == "tool_use":
        said.add_call(number, id=block["id"], name=block["name"])


def _usage(body: Body, prompt: str, sampled: str) -> tuple[int | None, int | None]:
    usage = body.get("usage") or {}
    return usage.get(prompt), usage.get(sampled)


_WHOLE: dict[str, Callable[[Body], Said]] = {
    chat.PATH: _chat,
    completions.PATH: _completions,
    responses.PATH: _responses,
    messages.PATH: _messages,
}
_STREAMED: dict[str, Callable[[Iterator[Body]], Said]] = {
    chat.PATH: _chat_stream,
    completions.PATH: _completions_stream,
    responses.PATH: _responses_stream,
    messages.PATH: _messages_stream,
}

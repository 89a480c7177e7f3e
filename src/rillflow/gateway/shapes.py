"""What is answered, as types: the description of the routes is made from them and tests hold the answers to them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# ---------------------------------------------------------------- OpenAI


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: Error


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatSaid(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatSaid
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None


class ChatAnswer(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class CompletionAnswer(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ResponsesAnswer(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: float
    model: str
    status: Literal["completed", "incomplete", "failed"]
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ResponsesCount(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


# ---------------------------------------------------------------- Anthropic


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicError


class AnthropicUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class SaidText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class SaidThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class SaidToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessagesAnswer(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[SaidText | SaidThinking | SaidToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class CountAnswer(msgspec.Struct):
    input_tokens: int


class AnthropicModel(msgspec.Struct):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class AnthropicModels(msgspec.Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str

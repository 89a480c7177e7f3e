"""The answers of the gateway's routes as structs, and errors of calls.

Dialects build the structs, and the description of the routes shows them. Each dialect writes errors in the shape of its
provider.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rillflow.errors import RillflowError

Unset = msgspec.UnsetType


class CallRefused(RillflowError):
    """A call that cannot be served. `code` and `param` are as in OpenAI's errors; `status` is the HTTP status."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def session_gone(session: str) -> CallRefused:
    return CallRefused(f"session {session!r} is not open", status=404, code="session_not_found")


def session_late(session: str) -> CallRefused:
    return CallRefused(f"the deadline of session {session!r} has passed", status=504, code="deadline_exceeded")


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


class TokenLogprob(msgspec.Struct):
    """`bytes` is None for a token that holds part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any]


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
    tool_calls: list[CalledTool] | Unset = msgspec.UNSET
    reasoning_content: str | Unset = msgspec.UNSET


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatSaid
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class ChatAnswer(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """`finish_reason` is None in a stream until the answer has ended."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None


class CompletionAnswer(msgspec.Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(msgspec.Struct, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str


class Models(msgspec.Struct, tag_field="object", tag="list"):
    data: list[Model]


# ---------------------------------------------------------------- OpenAI's responses


Status = Literal["completed", "incomplete", "failed", "in_progress"]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = ReasoningItem | MessageItem | CallItem


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponsesAnswer(msgspec.Struct, kw_only=True, tag_field="object", tag="response"):
    """A response. One that is retrieved later lacks the fields that only its request had."""

    id: str
    created_at: float
    status: Status
    model: str
    output: list[OutputItem]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    temperature: float | None = None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None = None
    usage: ResponsesUsage | None = None
    background: bool | Unset = msgspec.UNSET
    max_output_tokens: int | Unset | None = msgspec.UNSET
    previous_response_id: str | Unset | None = msgspec.UNSET
    reasoning: dict[str, Any] | Unset = msgspec.UNSET
    store: bool | Unset = msgspec.UNSET
    text: dict[str, Any] | Unset = msgspec.UNSET
    truncation: str | Unset = msgspec.UNSET
    user: str | Unset | None = msgspec.UNSET


class ResponsesCount(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


# ---------------------------------------------------------------- Anthropic


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicError


class AnthropicUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class SaidText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class SaidThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class SaidToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessagesAnswer(msgspec.Struct, tag_field="type", tag="message"):
    """`stop_reason` is None in the first event of a stream."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[SaidText | SaidThinking | SaidToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CountAnswer(msgspec.Struct):
    input_tokens: int


class AnthropicModel(msgspec.Struct, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class AnthropicModels(msgspec.Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str

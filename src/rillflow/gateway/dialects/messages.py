"""Anthropic's messages dialect: its request to a `Call`, an `Answer` to its response or its events.

The model gets the same prompt as through the OpenAI chat dialect: tools are rendered as functions, each tool result is
a separate message, and blocks of text are concatenated. Unknown fields are ignored, because clients send extras. A
known field with a wrong type, or beyond a limit, is refused by name. Thinking is shown if the model wrote some,
whatever the request says about it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import ContextOverflow, RillflowError
from rillflow.gateway.answers import Answer, Choice, Piece
from rillflow.gateway.calls import Call
from rillflow.gateway.dialects.openai import Positive, Share, Temperature, TopK, named_event, read, sampling, within
from rillflow.gateway.dialects.openai import Text as NonEmpty
from rillflow.gateway.dialects.structured import forced, formatted
from rillflow.gateway.shapes import (
    AnthropicError,
    AnthropicErrorAnswer,
    AnthropicUsage,
    CallRefused,
    MessagesAnswer,
    SaidText,
    SaidThinking,
    SaidToolUse,
)
from rillflow.gateway.trees.messages import Body, Message, ToolCall, dump_object, message, parse_object
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.template import Tools, prompt_key

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Block(msgspec.Struct, tag_field="type"):
    """A part of a message's content. Only the kinds below are accepted; others are refused by their `type`."""


class Text(Block, tag="text"):
    text: str


class Thinking(Block, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinking(Block, tag="redacted_thinking"):
    data: str = ""


class ToolUse(Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Text | Thinking | RedactedThinking | ToolUse | ToolResult]


class Tool(msgspec.Struct):
    name: NonEmpty
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None


class CountRequest(msgspec.Struct):
    model: str
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Positive
    tool_choice: ToolChoice | None = None
    stop_sequences: list[NonEmpty] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


# ---------------------------------------------------------------- the request


def decode(raw: bytes, limits: GatewayConfig) -> MessagesRequest:
    request = read(_decoder, raw)
    _check(request, limits)
    within("stop_sequences", len(request.stop_sequences or ()), limits.stops)
    within("max_tokens", request.max_tokens, limits.tokens)
    return request


def decode_count(raw: bytes, limits: GatewayConfig) -> CountRequest:
    request = read(_count_decoder, raw)
    _check(request, limits)
    return request


def _check(request: CountRequest, limits: GatewayConfig) -> None:
    within("messages", len(request.messages), limits.messages)
    within("tools", len(request.tools or ()), limits.tools)
    if request.messages[-1].role == "assistant":
        raise CallRefused(
            "the last message is the assistant's, but a given beginning of an answer cannot be continued: "
            "end with a message of the user or a tool",
            param="messages",
        )


def to_call(request: MessagesRequest, defaults: SamplingConfig) -> Call:
    history, tools, tools_key = prompt_of(request)
    hidden = request.tool_choice is not None and request.tool_choice.type == "none"
    grammar = formatted("output_format", request.output_format)
    if request.output_config is not None and grammar is None:
        grammar = formatted("output_config.format", request.output_config.format)
    return Call(
        policy=request.model,
        history=history,
        tools=tools,
        tools_key=tools_key,
        options=request.chat_template_kwargs or {},
        sampling=sampling(request, defaults, request.max_tokens, grammar=grammar),
        stops=tuple(request.stop_sequences or ()),
        parse_tools=tools is not None and not hidden,
        live=bool(request.stream),
        forced=_forced(request.tool_choice, tools),
    )


def _forced(choice: ToolChoice | None, tools: Tools) -> tuple[str, ...]:
    if choice is None or choice.type in ("auto", "none"):
        return ()
    return forced("required" if choice.type == "any" else {"type": "function", "name": choice.name}, tools)


def prompt_of(request: CountRequest) -> tuple[list[Message], Tools, bytes]:
    """Return what the chat template gets: the history, the tools, and the key of the tools and options."""
    history = [message("system", _joined(request.system))] if request.system else []
    for place, turn in enumerate(request.messages):
        history += _assistant(turn, place) if turn.role == "assistant" else _said(turn, place)
    tools = [_function(tool) for tool in request.tools] if request.tools else None
    return history, tools, prompt_key(tools, request.chat_template_kwargs)


def _function(tool: Tool) -> Body:
    described = {} if tool.description is None else {"description": tool.description}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema, **strict}}


def _joined(content: str | list[Text] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


def _assistant(turn: Turn, place: int) -> list[Message]:
    if isinstance(turn.content, str):
        return [message("assistant", turn.content)]
    text, reasoning, calls = "", "", []
    for number, block in enumerate(turn.content):
        match block:
            case Text():
                text += block.text
            case Thinking():
                reasoning += block.thinking
            case ToolUse():
                calls.append(ToolCall(block.id, block.name, dump_object(block.input)))
            case ToolResult():
                raise _misplaced(place, number, "a tool_result must be in a user's message")
    return [message("assistant", text, calls, reasoning=reasoning)]


def _said(turn: Turn, place: int) -> list[Message]:
    """Return the messages of a user's or system turn. Each tool result in it becomes a separate message."""
    if isinstance(turn.content, str):
        return [message(turn.role, turn.content)]
    made: list[Message] = []
    texts: list[Text] = []
    for number, block in enumerate(turn.content):
        if isinstance(block, Text):
            texts.append(block)
        elif isinstance(block, ToolResult):
            made += [message(turn.role, _joined(texts))] if texts else []
            texts = []
            made.append(message("tool", _result(block), call_id=block.tool_use_id))
        else:
            raise _misplaced(place, number, "thinking and tool_use must be in an assistant's message")
    return [*made, message(turn.role, _joined(texts))] if texts or not made else made


def _result(block: ToolResult) -> str:
    return _joined(block.content) or ("error" if block.is_error else "")


def _misplaced(place: int, number: int, why: str) -> CallRefused:
    return CallRefused(why, param=f"messages[{place}].content[{number}].type")


# ---------------------------------------------------------------- the response


def whole(request: MessagesRequest, answer: Answer, renderer: Renderer) -> bytes:
    (choice,) = answer.choices
    shown = _empty(request, answer)
    if choice.reasoning:
        shown.content.append(SaidThinking(thinking=choice.reasoning, signature=answer.id))
    if choice.text:
        shown.content.append(SaidText(text=choice.text))
    shown.content += [_tool_use(call, parse_object(call.arguments) or {}) for call in choice.calls]
    shown.stop_reason, shown.stop_sequence = _end(choice)
    shown.usage = _usage(answer)
    return msgspec.json.encode(shown)


def _empty(request: MessagesRequest, answer: Answer) -> MessagesAnswer:
    """Return an answer without content, as a stream begins."""
    return MessagesAnswer(
        id=f"msg_{answer.id}",
        role="assistant",
        model=request.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=AnthropicUsage(input_tokens=answer.prompt_tokens, output_tokens=0),
    )


def _tool_use(call: ToolCall, input: dict[str, Any]) -> SaidToolUse:
    return SaidToolUse(id=call.id, name=call.name, input=input)


def _end(choice: Choice) -> tuple[StopReason, str | None]:
    """Return the stop reason of an answer, and its stop sequence if that ended it."""
    if choice.finish == "length":
        return "max_tokens", None
    if choice.calls:
        return "tool_use", None
    return ("stop_sequence", choice.stop) if choice.stop else ("end_turn", None)


def _usage(answer: Answer) -> AnthropicUsage:
    return AnthropicUsage(input_tokens=answer.prompt_tokens, output_tokens=answer.completion_tokens)


# ---------------------------------------------------------------- the stream


async def stream(request: MessagesRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    """Yield events while the engine samples. The first comes with the first piece."""
    blocks = _Blocks(answer.id)
    begun = False
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            if not begun:
                begun = True
                yield _event("message_start", {"message": _empty(request, answer)})
            for data in blocks.events(piece):
                yield data
    reason, sequence = _end(answer.choices[0])
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    yield _event("message_delta", {"delta": delta, "usage": _usage(answer)})
    yield _event("message_stop", {})


class _Blocks:
    """Writes pieces as blocks. One block is open at a time; it is closed before another begins or the answer ends."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._index = -1
        self._open = ""

    def events(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._into("thinking", SaidThinking(thinking="", signature=""))
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._into("text", SaidText(text=""))
            yield self._delta({"type": "text_delta", "text": piece.text})
        if piece.call is not None:
            yield from self._close()
            yield from self._into("tool_use", _tool_use(piece.call, {}))
            yield self._delta({"type": "input_json_delta", "partial_json": piece.call.arguments})
        if piece.finish is not None:
            yield from self._close()

    def _into(self, kind: str, block: SaidText | SaidThinking | SaidToolUse) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            yield _event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._id})
        if self._open:
            self._open = ""
            yield _event("content_block_stop", {"index": self._index})

    def _delta(self, delta: Body) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})


def _event(name: str, value: Body) -> bytes:
    return named_event({"type": name} | value)


# ---------------------------------------------------------------- errors


def error_body(error: RillflowError) -> AnthropicErrorAnswer:
    """Return an error in Anthropic's shape, whose clients choose their exception by status and `type`."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = error.message
    if isinstance(error, ContextOverflow):
        text = f"prompt is too long: {text}"
    elif isinstance(error, CallRefused) and error.param:
        text = f"{error.param}: {text}"
    return AnthropicErrorAnswer(AnthropicError(type=kind, message=text))


def error_event(error: RillflowError) -> bytes:
    """Return the last event of a stream that fails after it began."""
    return _event("error", {"error": error_body(error).error})

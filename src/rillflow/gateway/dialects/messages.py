"""Anthropic's messages dialect: its request to a `Call`, an `Answer` to its response or its events.

The model sees the prompt that it would see through the OpenAI chat dialect: tools are rendered in the function
shape, results of tools as messages of their own, blocks of text put together as they are. Fields that this gateway
does not know are ignored, because clients send extras; a known field of the wrong type, or past a limit, is refused
by name. Thinking is shown where the model wrote some, whatever the request says about it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import ContextOverflow, RillflowError
from rillflow.gateway.calls import Answer, Call, Choice, Piece
from rillflow.gateway.dialects.openai import Positive, Share, Temperature, TopK, read, sampling, within
from rillflow.gateway.dialects.openai import Text as NonEmpty
from rillflow.gateway.dialects.sse import named_event
from rillflow.gateway.dialects.structured import forced, formatted
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.trees.messages import Body, Message, ToolCall, dump_object, message, parse_object
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.template import Tools, prompt_key

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
    """A part of a message's content; the kinds that are no text and no tool's are refused by their `type`."""


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
            "the last one is the assistant's: an answer that somebody else began is not continued, "
            "so let the user or a tool have the last word",
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
    """What the chat template is given: the history, the tools, and the key that tells equal lists of tools."""
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
                raise _misplaced(place, number, "a tool_result belongs into a user's message")
    return [message("assistant", text, calls, reasoning=reasoning)]


def _said(turn: Turn, place: int) -> list[Message]:
    """A message of the user or the system; each result of a tool in it becomes a message of its own, in its place."""
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
            raise _misplaced(place, number, "only the assistant thinks and uses tools")
    return [*made, message(turn.role, _joined(texts))] if texts or not made else made


def _result(block: ToolResult) -> str:
    return _joined(block.content) or ("error" if block.is_error else "")


def _misplaced(place: int, number: int, why: str) -> CallRefused:
    return CallRefused(why, param=f"messages[{place}].content[{number}].type")


# ---------------------------------------------------------------- the response


def whole(request: MessagesRequest, answer: Answer, renderer: Renderer) -> bytes:
    (choice,) = answer.choices
    content: list[Body] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": answer.id})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    content += [_tool_use(call) | {"input": parse_object(call.arguments) or {}} for call in choice.calls]
    return msgspec.json.encode(_head(request, answer) | {"content": content} | _end(choice) | {"usage": _usage(answer)})


def _head(request: MessagesRequest, answer: Answer) -> Body:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model}


def _tool_use(call: ToolCall) -> Body:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _end(choice: Choice) -> Body:
    if choice.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answer: Answer) -> Body:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


# ---------------------------------------------------------------- the stream


async def stream(request: MessagesRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    """Events as the engine samples; the first one comes once something is known to have been sampled."""
    blocks = _Blocks(answer.id)
    begun = False
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            if not begun:
                begun = True
                yield _message_start(request, answer)
            for data in blocks.events(piece):
                yield data
    yield _event("message_delta", {"delta": _end(answer.choices[0]), "usage": _usage(answer)})
    yield _event("message_stop", {})


def _message_start(request: MessagesRequest, answer: Answer) -> bytes:
    empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(answer) | {"output_tokens": 0}
    return _event("message_start", {"message": _head(request, answer) | empty | {"usage": usage}})


class _Blocks:
    """Pieces to blocks: one is open at a time, and it is closed before another begins or the answer ends."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._index = -1
        self._open = ""

    def events(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            yield from self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._into("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})
        if piece.call is not None:
            yield from self._close()
            yield from self._into("tool_use", _tool_use(piece.call))
            yield self._delta({"type": "input_json_delta", "partial_json": piece.call.arguments})
        if piece.finish is not None:
            yield from self._close()

    def _into(self, kind: str, block: Body) -> Iterator[bytes]:
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


def error_body(error: RillflowError) -> Body:
    """The provider's shape: clients choose their exception by status and `type`."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = error.message
    if isinstance(error, ContextOverflow):
        text = f"prompt is too long: {text}"
    elif isinstance(error, CallRefused) and error.param:
        text = f"{error.param}: {text}"
    return {"type": "error", "error": {"type": kind, "message": text}}


def error_event(error: RillflowError) -> bytes:
    """How a stream that has begun says that it was cut."""
    return _event("error", error_body(error))

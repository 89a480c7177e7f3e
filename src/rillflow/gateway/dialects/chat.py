"""The OpenAI chat-completions dialect: its request to a `Call`, an `Answer` to its response or its stream.

`tool_choice` "none" keeps the tools in the prompt but parses no calls. With "required" or a named tool, exactly one
call is sampled. With `allowed_tools` all tools stay in the prompt, and a call of a tool that is not allowed stays text.
`parallel_tool_calls` changes nothing. Reasoning is shown as `reasoning_content`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.gateway.answers import Answer, Choice, Piece
from rillflow.gateway.calls import Call
from rillflow.gateway.dialects.openai import (
    DONE,
    Chunks,
    Distortions,
    NonNegative,
    Part,
    Positive,
    Share,
    Stop,
    StreamOptions,
    Temperature,
    ToolChoice,
    TopK,
    as_stops,
    error_body,
    error_event,
    joined,
    logprob_entries,
    read,
    refuse_distortions,
    sampled,
    sampling,
    tokens_within,
    usage,
    within,
)
from rillflow.gateway.dialects.structured import allowed, forced, functions, guided
from rillflow.gateway.shapes import (
    CalledFunction,
    CalledTool,
    CallRefused,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatSaid,
)
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.template import prompt_key

PATH = "/v1/chat/completions"
__all__ = ["PATH", "decode", "error_body", "error_event", "stream", "to_call", "to_message", "whole"]

_ROLES = {"developer": "system", "function": "tool"}


class Function(msgspec.Struct):
    name: str
    arguments: str


class Called(msgspec.Struct):
    function: Function
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Distortions, kw_only=True):
    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    stop: Stop = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    functions: list[dict[str, Any]] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None


_decoder = msgspec.json.Decoder(ChatRequest)


# ---------------------------------------------------------------- the request


def decode(raw: bytes, limits: GatewayConfig) -> ChatRequest:
    request = read(_decoder, raw)
    refuse_distortions(request)
    within("messages", len(request.messages), limits.messages)
    within("tools", len(request.tools or ()), limits.tools)
    within("n", request.n or 1, limits.choices)
    within("stop", len(as_stops(request.stop)), limits.stops)
    named = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    tokens_within(named, _max_tokens(request), request.n or 1, limits)
    if not request.messages:
        raise CallRefused("at least one message is needed", param="messages")
    if request.top_logprobs:
        raise CallRefused("only the sampled token's log-prob is known", param="top_logprobs")
    if request.chat_template is not None:
        raise CallRefused("set the chat template in the recipe: policies.NAME.chat_template", param="chat_template")
    if request.functions:
        raise CallRefused("offer functions as `tools`", param="functions")
    return request


def _max_tokens(request: ChatRequest) -> int | None:
    return request.max_completion_tokens or request.max_tokens


def to_call(request: ChatRequest, defaults: SamplingConfig) -> Call:
    tools = functions(request.tools) or None
    return Call(
        policy=request.model,
        history=[to_message(place, given) for place, given in enumerate(request.messages)],
        tools=tools,
        tools_key=prompt_key(tools, request.chat_template_kwargs),
        sampling=sampling(
            request, defaults, _max_tokens(request), request.seed, guided(request, request.response_format)
        ),
        choices=request.n or 1,
        stops=as_stops(request.stop),
        parse_tools=tools is not None and request.tool_choice != "none",
        live=bool(request.stream),
        logprobs=bool(request.logprobs),
        forced=forced(request.tool_choice, tools),
        allowed=allowed(request.tool_choice, tools),
        options=request.chat_template_kwargs or {},
    )


def to_message(place: int, given: ChatMessage) -> Message:
    """Return the message at `place` of a request."""
    content, called = given.content, given.tool_calls
    if not isinstance(content, str):
        content = joined(content, f"messages[{place}].content")
    return message(
        _ROLES.get(given.role, given.role),
        content or given.refusal or "",
        [ToolCall(call.id, call.function.name, call.function.arguments) for call in called] if called else (),
        reasoning=given.reasoning_content or "",
        name=given.name or "",
        call_id=given.tool_call_id or "",
    )


# ---------------------------------------------------------------- the response


def whole(request: ChatRequest, answer: Answer, renderer: Renderer) -> bytes:
    shown = ChatAnswer(
        id=f"chatcmpl-{answer.id}",
        created=answer.created,
        model=request.model,
        choices=[_choice(request, choice, renderer) for choice in answer.choices],
        usage=usage(answer),
    )
    return msgspec.json.encode(shown)


def _choice(request: ChatRequest, choice: Choice, renderer: Renderer) -> ChatChoice:
    said = ChatSaid(role="assistant", content=choice.text, refusal=None)
    if choice.reasoning:
        said.reasoning_content = choice.reasoning
    if choice.calls:
        said.content = choice.text or None
        said.tool_calls = [_called(call) for call in choice.calls]
    return ChatChoice(
        index=choice.index,
        message=said,
        finish_reason=_finish(choice),
        logprobs=_logprobs(sampled(choice), renderer) if request.logprobs else None,
    )


def _called(call: ToolCall) -> CalledTool:
    return CalledTool(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))


def _finish(choice: Choice) -> Literal["stop", "length", "tool_calls"]:
    if choice.finish == "length":
        return "length"
    return "tool_calls" if choice.calls else "stop"


def _logprobs(tokens: tuple[tuple[int, float], ...], renderer: Renderer) -> ChatLogprobs:
    return ChatLogprobs(content=logprob_entries(tokens, renderer), refusal=None)


# ---------------------------------------------------------------- the stream


async def stream(request: ChatRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    """Yield events while the engine samples. The first comes with the first piece."""
    chunks = Chunks(f"chatcmpl-{answer.id}", "chat.completion.chunk", request.model, answer, request.stream_options)
    begun: set[int] = set()
    called = [0] * len(answer.choices)
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            if piece.choice not in begun:
                begun.add(piece.choice)
                yield chunks.one(_delta(piece.choice, {"role": "assistant", "content": ""}))
            shown = _logprobs(piece.tokens, renderer) if piece.tokens else None
            for delta in _deltas(piece, answer.choices[piece.choice], called[piece.choice]):
                yield chunks.one(delta | {"logprobs": shown})
                shown = None
            called[piece.choice] += piece.call is not None
    yield chunks.usage() + DONE


def _deltas(piece: Piece, choice: Choice, number: int) -> list[dict[str, Any]]:
    """Return the deltas of a piece. A call has two: its id and name, then its arguments; `number` is its index."""
    if piece.finish is not None:
        return [_delta(piece.choice, {}, _finish(choice))]
    if piece.call is None:
        said = {"content": piece.text} if piece.text else {"reasoning_content": piece.reasoning}
        return [_delta(piece.choice, said)]
    named = {"index": number} | msgspec.structs.asdict(_called(piece.call._replace(arguments="")))
    arguments = {"index": number, "function": {"arguments": piece.call.arguments}}
    return [_delta(piece.choice, {"tool_calls": [part]}) for part in (named, arguments)]


def _delta(index: int, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}

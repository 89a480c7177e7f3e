"""The OpenAI chat-completions dialect: its request to a `Call`, an `Answer` to its response or its stream.

Fields that this gateway does not know are ignored, because clients send extras; a known field of the wrong type, or
past a limit, is refused by name. Nothing of the engine (ids, versions) is shown to the agent.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.gateway.calls import Answer, Call, Choice, Piece
from rillflow.gateway.dialects.openai import DONE, error_body, error_event, event
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.messages import Message, ToolCall, message
from rillflow.gateway.render import Renderer
from rillflow.types import Sampling

PATH = "/v1/chat/completions"
__all__ = ["PATH", "decode", "error_body", "error_event", "stream", "to_call", "whole"]

Temperature = Annotated[float, msgspec.Meta(ge=0, le=10)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]

_ROLES = {"developer": "system"}
_PATH = re.compile(r" - at `\$\.?(.*)`$")


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct):
    name: str
    arguments: str


class Called(msgspec.Struct):
    function: Function
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    stop: Text | list[Text] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: NonNegative | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


# ---------------------------------------------------------------- the request


def decode(raw: bytes, limits: GatewayConfig) -> ChatRequest:
    try:
        request = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        path = _PATH.search(str(error))
        raise CallRefused(str(error), param=path[1] if path else None) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CallRefused(f"the body is not JSON: {error}") from error
    _within("messages", len(request.messages), limits.messages)
    _within("tools", len(request.tools or ()), limits.tools)
    _within("n", request.n or 1, limits.choices)
    _within("stop", len(_stops(request)), limits.stops)
    if not request.messages:
        raise CallRefused("at least one message is needed", param="messages")
    if request.top_logprobs:
        raise CallRefused("only the sampled token's log-prob is known", param="top_logprobs")
    return request


def _within(param: str, asked: int, limit: int) -> None:
    if asked > limit:
        raise CallRefused(f"at most {limit} are allowed, got {asked}", param=param)


def _stops(request: ChatRequest) -> tuple[str, ...]:
    stop = request.stop or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def to_call(request: ChatRequest, defaults: SamplingConfig) -> Call:
    """The agent's own sampling wins over the recipe's, field by field."""
    tools = request.tools or None
    return Call(
        policy=request.model,
        history=[_message(place, given) for place, given in enumerate(request.messages)],
        tools=tools,
        tools_key=msgspec.json.encode(tools, order="sorted") if tools else b"",
        sampling=_sampling(request, defaults),
        choices=request.n or 1,
        stops=_stops(request),
        parse_tools=tools is not None and request.tool_choice != "none",
        live=bool(request.stream),
    )


def _sampling(request: ChatRequest, defaults: SamplingConfig) -> Sampling:
    return Sampling(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=request.top_p or defaults.top_p,
        top_k=defaults.top_k if request.top_k is None else request.top_k,
        max_tokens=request.max_completion_tokens or request.max_tokens or defaults.max_tokens,
        seed=request.seed,
    )


def _message(place: int, given: ChatMessage) -> Message:
    calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ()]
    return message(
        _ROLES.get(given.role, given.role),
        _text(place, given.content),
        calls,
        reasoning=given.reasoning_content or "",
        name=given.name or "",
        call_id=given.tool_call_id or "",
    )


def _text(place: int, content: str | list[Part] | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content or ()):
        text = part.text if part.text is not None else part.refusal
        if text is None:
            raise CallRefused(
                f"only text parts are understood, not {part.type!r}",
                param=f"messages[{place}].content[{number}].type",
            )
        texts.append(text)
    return "".join(texts)


# ---------------------------------------------------------------- the response


def whole(request: ChatRequest, answer: Answer, renderer: Renderer) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": request.model,
            "choices": [_choice(request, choice, renderer) for choice in answer.choices],
            "usage": _usage(answer),
        }
    )


def _choice(request: ChatRequest, choice: Choice, renderer: Renderer) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        said["content"] = choice.text or None
        said["tool_calls"] = [call.body() for call in choice.calls]
    tokens = tuple(zip(choice.node.tokens, choice.node.logprobs, strict=True)) if request.logprobs else ()
    return {
        "index": choice.index,
        "message": said,
        "finish_reason": _finish(choice),
        "logprobs": _logprobs(tokens, choice, renderer) if request.logprobs else None,
    }


def _finish(choice: Choice) -> str:
    return "tool_calls" if choice.calls and choice.finish == "stop" else choice.finish


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completed = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def _logprobs(tokens: tuple[tuple[int, float], ...], choice: Choice, renderer: Renderer) -> dict[str, Any]:
    content = []
    for token, logprob in tokens:
        if token in choice.stop_tokens:
            continue
        text = renderer.decode([token])
        # Part of a character has no text of its own, and its bytes are not to be had from every tokenizer.
        known = list(text.encode()) if "\ufffd" not in text else None
        content.append({"token": text, "logprob": logprob, "bytes": known, "top_logprobs": []})
    return {"content": content, "refusal": None}


# ---------------------------------------------------------------- the stream


async def stream(request: ChatRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    """Events as the engine samples; the first one comes once something is known to have been sampled."""
    with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion.chunk",
        "created": answer.created,
        "model": request.model,
    } | ({"usage": None} if with_usage else {})
    begun: set[int] = set()
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            choice = answer.choices[piece.choice]
            if piece.choice not in begun:
                begun.add(piece.choice)
                yield event(head | {"choices": [_delta(piece.choice, {"role": "assistant", "content": ""})]})
            shown = _logprobs(piece.tokens, choice, renderer) if request.logprobs and piece.tokens else None
            for delta in _deltas(piece, choice):
                yield event(head | {"choices": [delta | {"logprobs": shown}]})
                shown = None
    if with_usage:
        yield event(head | {"choices": [], "usage": _usage(answer)})
    yield DONE


def _deltas(piece: Piece, choice: Choice) -> list[dict[str, Any]]:
    if piece.finish is not None:
        return [_delta(piece.choice, {}, _finish(choice))]
    if piece.call is None:
        return [_delta(piece.choice, {"content": piece.text})]
    index = next(number for number, call in enumerate(choice.calls) if call.id == piece.call.id)
    named = piece.call._replace(arguments="").body() | {"index": index}
    arguments = {"index": index, "function": {"arguments": piece.call.arguments}}
    return [_delta(piece.choice, {"tool_calls": [part]}) for part in (named, arguments)]


def _delta(index: int, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}

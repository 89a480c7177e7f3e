"""The OpenAI completions dialect: a raw prompt, text or ids, and the text that follows it.

The prompt is continued as it is, without a chat template. A request has one prompt. Only the log-prob of the sampled
token is known, so `top_logprobs` is null, and log-probs of the prompt (`echo` with `logprobs`) are refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import RillflowError
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call
from rillflow.gateway.dialects import openai
from rillflow.gateway.dialects.openai import (
    DONE,
    Chunks,
    Distortions,
    Positive,
    Share,
    Stop,
    StreamOptions,
    Temperature,
    TopK,
    as_stops,
    error_event,
    logprob_entries,
    read,
    refuse_distortions,
    sampled,
    sampling,
    tokens_within,
    usage,
    within,
)
from rillflow.gateway.dialects.structured import guided
from rillflow.gateway.shapes import CallRefused, CompletionAnswer, CompletionChoice, CompletionLogprobs, ErrorAnswer
from rillflow.gateway.trees.render import Renderer
from rillflow.types import FinishReason

PATH = "/v1/completions"
__all__ = ["PATH", "decode", "error_body", "error_event", "stream", "to_call", "whole"]


class CompletionRequest(Distortions, kw_only=True):
    model: str
    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    stop: Stop = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    seed: int | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)


# ---------------------------------------------------------------- the request


def decode(raw: bytes, limits: GatewayConfig) -> CompletionRequest:
    request = read(_decoder, raw)
    refuse_distortions(request)
    within("n", request.n or 1, limits.choices)
    within("stop", len(as_stops(request.stop)), limits.stops)
    tokens_within("max_tokens", request.max_tokens, request.n or 1, limits)
    _prompt(request)
    if request.suffix:
        raise CallRefused("text can only be continued, not filled in", param="suffix")
    if request.best_of not in (None, request.n or 1):
        raise CallRefused("every sampled answer is returned: use `n`", param="best_of")
    if request.echo and request.logprobs is not None:
        raise CallRefused("the log-probs of the prompt are not known", param="echo")
    return request


def _prompt(request: CompletionRequest) -> str | list[int]:
    """Return the one prompt, which may be in a list."""
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise CallRefused(f"a request has one prompt, got {len(prompt)}", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise CallRefused("the prompt must not be empty", param="prompt")
    if not isinstance(prompt, str) and not all(type(id) is int and id >= 0 for id in prompt):
        raise CallRefused("a prompt is text or a list of token ids", param="prompt")
    return prompt


def to_call(request: CompletionRequest, defaults: SamplingConfig) -> Call:
    return Call(
        policy=request.model,
        history=[],
        tools=None,
        tools_key=b"",
        sampling=sampling(
            request, defaults, request.max_tokens, request.seed, guided(request, request.response_format)
        ),
        choices=request.n or 1,
        stops=as_stops(request.stop),
        live=bool(request.stream),
        logprobs=request.logprobs is not None,
        prompt=_prompt(request),
    )


# ---------------------------------------------------------------- the response


def whole(request: CompletionRequest, answer: Answer, renderer: Renderer) -> bytes:
    before = _echo(request, answer, renderer)
    choices = [
        CompletionChoice(
            index=choice.index,
            text=before + choice.text,
            finish_reason=_finish(choice.finish),
            logprobs=None if request.logprobs is None else _logprobs(sampled(choice), renderer, 0),
        )
        for choice in answer.choices
    ]
    shown = CompletionAnswer(
        id=f"cmpl-{answer.id}", created=answer.created, model=request.model, choices=choices, usage=usage(answer)
    )
    return msgspec.json.encode(shown)


def _finish(finish: FinishReason | None) -> Literal["stop", "length"] | None:
    """Return the finish of an answer; an aborted one is never shown."""
    return None if finish == "abort" else finish


def _echo(request: CompletionRequest, answer: Answer, renderer: Renderer) -> str:
    if not request.echo:
        return ""
    prompt = _prompt(request)
    return prompt if isinstance(prompt, str) else renderer.decode(answer.prompt)


def _logprobs(tokens: Iterable[tuple[int, float]], renderer: Renderer, offset: int) -> CompletionLogprobs:
    """Return the log-probs of tokens. `offset` is the length of the answer's text before them."""
    entries = logprob_entries(tokens, renderer)
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return CompletionLogprobs(
        tokens=[entry.token for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=None,
        text_offset=offsets,
    )


async def stream(request: CompletionRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    chunks = Chunks(f"cmpl-{answer.id}", "text_completion", request.model, answer, request.stream_options)
    echo = _echo(request, answer, renderer)
    echoed: set[int] = set()
    offsets = [0] * len(answer.choices)
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            before = echo if piece.choice not in echoed else ""
            echoed.add(piece.choice)
            shown = _logprobs(piece.tokens, renderer, offsets[piece.choice]) if piece.tokens else None
            offsets[piece.choice] += sum(map(len, shown.tokens)) if shown else 0
            text, finish = before + piece.text, _finish(piece.finish)
            yield chunks.one(
                CompletionChoice(index=piece.choice, text=text, finish_reason=finish, logprobs=shown),
            )
    yield chunks.usage() + DONE


def error_body(error: RillflowError) -> ErrorAnswer:
    return openai.error_body(error, prompt="prompt")

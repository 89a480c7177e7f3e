"""What the OpenAI dialects share: checks of a request, sampling, log-probs, errors and events.

Fields that a dialect does not know are ignored, because clients send extras. A known field with a wrong type, or beyond
a limit, is refused by name, and so is a field that would change the sampled distribution. The agent sees no token ids
or versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import ContextOverflow, RillflowError
from rillflow.gateway.answers import Answer, Choice
from rillflow.gateway.shapes import CallRefused, Error, ErrorAnswer, TokenLogprob, Usage
from rillflow.gateway.trees.render import Renderer
from rillflow.types import LOWEST_TEMPERATURE, Grammar, Sampling

Temperature = Annotated[float, msgspec.Meta(ge=0, le=10)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Stop = str | list[str] | None
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any] | None

DONE = b"data: [DONE]\n\n"

Decoded = TypeVar("Decoded")

# Engines hold these as 32-bit numbers. Values beyond them change nothing: no vocabulary is that large.
_MOST_K, _LEAST_P = (1 << 31) - 1, 1e-6

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class Part(msgspec.Struct):
    """A part of a message's content. Only text is accepted."""

    type: str
    text: str | None = None
    refusal: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Sampled(Protocol):
    """The sampling parameters that requests of every dialect have."""

    temperature: float | None
    top_p: float | None
    top_k: int | None


class Distortions(msgspec.Struct, kw_only=True):
    """Fields of OpenAI's, vLLM's and SGLang's requests that change the distribution of the next token.

    No engine here applies them, and training would not account for them. Each is refused unless it changes nothing.
    """

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_a: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = None


_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_p": 0,
    "typical_p": 1,
    "top_a": 0,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": [],
    "use_beam_search": False,
}
_distortions = attrgetter(*_NEUTRAL)
_NONE = (None,) * len(_NEUTRAL)


# ---------------------------------------------------------------- the request


def refuse_distortions(request: Distortions) -> None:
    if _distortions(request) == _NONE:
        return
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and value != neutral:
            kept = msgspec.json.encode(neutral).decode()
            raise CallRefused(f"{name} is not supported: leave it out or send {kept}", param=name)


def read(decoder: msgspec.json.Decoder[Decoded], raw: bytes) -> Decoded:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        path = _PATH.search(str(error))
        raise CallRefused(str(error), param=path[1] if path else None) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CallRefused(f"the body is not JSON: {error}") from error


def within(param: str, asked: int, limit: int) -> None:
    if asked > limit:
        raise CallRefused(f"at most {limit} are allowed, got {asked}", param=param)


def tokens_within(param: str, asked: int | None, choices: int, limits: GatewayConfig) -> None:
    """Refuse a request for too many tokens over all its answers."""
    if asked is not None and asked * choices > limits.tokens:
        raise CallRefused(
            f"at most {limits.tokens} tokens may be asked for, got {choices} answers of {asked}", param=param
        )


def as_stops(stop: Stop) -> tuple[str, ...]:
    """Return the stop strings without empty ones."""
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))


def joined(content: str | Sequence[Part] | None, param: str) -> str:
    """Return the text of a message's content. `param` is its path in the request."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content or ()):
        text = part.text if part.text is not None else part.refusal
        if text is None:
            raise CallRefused(f"only text parts are accepted, not {part.type!r}", param=f"{param}[{number}].type")
        texts.append(text)
    return "".join(texts)


def sampling(
    request: Sampled,
    defaults: SamplingConfig,
    max_tokens: int | None,
    seed: int | None = None,
    grammar: Grammar | None = None,
) -> Sampling:
    """Return the sampling of a call: the agent's own parameters, else the recipe's; with `wins: recipe` the recipe's.

    A `top_k` of -1 or 0 switches it off. A `top_p` of 0 is the smallest value that an engine can hold. A temperature
    that engines would round is refused.
    """
    own = defaults.wins != "recipe"
    temperature = request.temperature if own and request.temperature is not None else defaults.temperature
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        raise CallRefused(
            f"temperature {temperature} is not supported: send 0 or at least {LOWEST_TEMPERATURE}", param="temperature"
        )
    top_p = request.top_p if own and request.top_p is not None else defaults.top_p
    top_k = request.top_k if own and request.top_k is not None else defaults.top_k
    return Sampling(
        temperature=temperature,
        top_p=max(top_p, _LEAST_P),
        top_k=min(max(top_k, 0), _MOST_K),
        max_tokens=max_tokens or defaults.max_tokens,
        seed=seed,
        grammar=grammar,
    )


def overruled(request: Sampled, defaults: SamplingConfig) -> str:
    """Return a parameter of the request that the recipe replaces, such as `temperature 0.0`; empty if none."""
    if defaults.wins != "recipe":
        return ""
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(request, name)
        if value is not None and value != getattr(defaults, name) and not (name == "top_k" and value == -1):
            return f"{name} {value}"
    return ""


# ---------------------------------------------------------------- the response


def usage(answer: Answer) -> Usage:
    prompt, completed = answer.prompt_tokens, answer.completion_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=completed, total_tokens=prompt + completed)


def sampled(choice: Choice) -> tuple[tuple[int, float], ...]:
    """Return the tokens of a whole answer with their log-probs."""
    return tuple(zip(choice.node.tokens, choice.node.logprobs, strict=True))


def logprob_entries(tokens: Iterable[tuple[int, float]], renderer: Renderer) -> list[TokenLogprob]:
    """Return one entry for each token, except stop tokens, which have no text."""
    entries = []
    for token, logprob in tokens:
        if token in renderer.stop_tokens:
            continue
        text = renderer.decode([token])
        # A token with part of a character has no text, and not every tokenizer gives its bytes.
        known = list(text.encode()) if "\ufffd" not in text else None
        entries.append(TokenLogprob(token=text, logprob=logprob, bytes=known, top_logprobs=[]))
    return entries


def error_body(error: RillflowError, prompt: str = "messages") -> ErrorAnswer:
    """Return an error in OpenAI's shape, whose clients choose their exception by status and `code`.

    `prompt` is the field that holds the prompt.
    """
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code, param = _CODES.get(error.status), None
    if isinstance(error, ContextOverflow):
        code, param = "context_length_exceeded", prompt
    elif isinstance(error, CallRefused):
        code, param = error.code or code, error.param
    return ErrorAnswer(Error(message=error.message, type=kind, param=param, code=code))


def error_event(error: RillflowError) -> bytes:
    """Return the last event of a stream that fails after it began."""
    return event(error_body(error))


# ---------------------------------------------------------------- streams


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Return an event that is named after its type, as some providers do."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), msgspec.json.encode(value))


class Chunks:
    """Writes the chunks of a stream of chat completions or completions. Their common head is encoded once."""

    def __init__(self, id: str, kind: str, model: str, answer: Answer, options: StreamOptions | None) -> None:
        self._answer = answer
        self._with_usage = options is not None and bool(options.include_usage)
        head = msgspec.json.encode({"id": id, "object": kind, "created": answer.created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"

    def one(self, choice: Any) -> bytes:
        return self._head + msgspec.json.encode(choice) + self._tail

    def usage(self) -> bytes:
        """Return the last chunk if the agent asked for usage."""
        if not self._with_usage:
            return b""
        counted = msgspec.json.encode(usage(self._answer))
        return self._head + b'],"usage":' + counted + b"}\n\n"

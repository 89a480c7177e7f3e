"""The OpenAI responses dialect: its request to a `Call`, an `Answer` to its response or its stream.

`previous_response_id` names an earlier answer of the same session, which is found in the session's trees. Nothing else
is stored, and `store` changes nothing: a response that is retrieved later has its output, and null for fields of its
request. The instructions of the earlier call are not carried over. Tools that the provider would run itself are left
out of the prompt: only functions can be called here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import EngineError, RillflowError
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call
from rillflow.gateway.dialects import openai
from rillflow.gateway.dialects.openai import (
    Distortions,
    NonNegative,
    Positive,
    Share,
    Temperature,
    ToolChoice,
    TopK,
    logprob_entries,
    named_event,
    read,
    refuse_distortions,
    sampled,
    sampling,
    tokens_within,
    within,
)
from rillflow.gateway.dialects.response_items import (
    Item,
    ResponseEvents,
    call_item,
    message_item,
    messages_of,
    reasoning_item,
    text_part,
)
from rillflow.gateway.dialects.structured import allowed, checked_type, forced, formatted
from rillflow.gateway.shapes import (
    CallRefused,
    ErrorAnswer,
    IncompleteDetails,
    OutputItem,
    ResponseError,
    ResponsesAnswer,
    ResponsesUsage,
    Status,
    TokenLogprob,
)
from rillflow.gateway.trees.messages import INSTRUCTIONS, REASONING, Message, ToolCall, dump_object, message
from rillflow.gateway.trees.render import Renderer
from rillflow.gateway.trees.template import prompt_key
from rillflow.gateway.trees.tree import Node

PATH = "/v1/responses"
COUNT_PATH = f"{PATH}/input_tokens"
__all__ = ["COUNT_PATH", "PATH", "decode", "error_body", "error_event", "kept", "stream", "to_call", "whole"]

_LOGPROBS = "message.output_text.logprobs"


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None


class ResponsesRequest(Distortions, kw_only=True):
    model: str
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    top_logprobs: NonNegative | None = None
    truncation: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())


_decoder = msgspec.json.Decoder(ResponsesRequest)


# ---------------------------------------------------------------- the request


def decode(raw: bytes, limits: GatewayConfig) -> ResponsesRequest:
    request = read(_decoder, raw)
    refuse_distortions(request)
    within("input", len(request.input) if isinstance(request.input, list) else 1, limits.messages)
    within("tools", len(request.tools or ()), limits.tools)
    tokens_within("max_output_tokens", request.max_output_tokens, 1, limits)
    if not request.input and request.previous_response_id is None:
        raise CallRefused("the input must not be empty", param="input")
    if request.top_logprobs:
        raise CallRefused("only the sampled token's log-prob is known", param="top_logprobs")
    if request.background:
        raise CallRefused("a response is sent on the connection of its request", param="background")
    if request.conversation is not None:
        raise CallRefused("send the items, or the id of the previous response", param="conversation")
    return request


def to_call(request: ResponsesRequest, defaults: SamplingConfig) -> Call:
    tools = _functions(request.tools or ()) or None
    return Call(
        policy=request.model,
        history=_history(request),
        tools=tools,
        tools_key=prompt_key(tools, request.chat_template_kwargs),
        sampling=sampling(
            request, defaults, request.max_output_tokens, grammar=formatted("text.format", _form(request))
        ),
        parse_tools=tools is not None and request.tool_choice != "none",
        live=bool(request.stream),
        logprobs=request.logprobs,
        previous=None if (given := request.previous_response_id) is None else given.removeprefix("resp_"),
        forced=forced(request.tool_choice, tools),
        allowed=allowed(request.tool_choice, tools),
        options=request.chat_template_kwargs or {},
    )


def _form(request: ResponsesRequest) -> dict[str, Any] | None:
    return request.text.format if request.text else None


def _history(request: ResponsesRequest) -> list[Message]:
    given = request.input
    said = [message("user", given)] if isinstance(given, str) else messages_of(given)
    if not request.instructions:
        return said
    head = message("system", request.instructions)
    head.body[INSTRUCTIONS] = True
    return [head, *said]


def _functions(tools: list[dict[str, Any]] | tuple[()]) -> list[dict[str, Any]]:
    """Return tools in the shape of chat completions, so that the model gets the same prompt in both dialects."""
    made = []
    for place, tool in enumerate(tools):
        if checked_type(tool, place) != "function":
            continue
        if not isinstance(tool.get("name"), str):
            raise CallRefused("a function needs a name", param=f"tools[{place}].name")
        shown = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in shown if tool.get(key) is not None}
        made.append({"type": "function", "function": function})
    return made


# ---------------------------------------------------------------- the response


def whole(request: ResponsesRequest, answer: Answer, renderer: Renderer) -> bytes:
    (choice,) = answer.choices
    logprobs = logprob_entries(sampled(choice), renderer) if request.logprobs else []
    said = _Said(choice.reasoning, choice.text, choice.calls, cut=choice.finish == "length")
    shown = _response(request, answer, "completed")
    _end(shown, _output(answer.id, said, logprobs), answer.prompt_tokens, answer.completion_tokens, cut=said.cut)
    return msgspec.json.encode(shown)


class _Said(NamedTuple):
    """The content of an answer. `cut`: it reached its length limit."""

    reasoning: str
    text: str
    calls: Sequence[ToolCall]
    cut: bool


def _output(id: str, said: _Said, logprobs: list[TokenLogprob]) -> list[OutputItem]:
    items: list[OutputItem] = []
    if said.reasoning:
        items.append(reasoning_item(f"rs_{id}_0", said.reasoning))
    if said.text or not (said.calls or said.reasoning):
        items.append(message_item(f"msg_{id}_{len(items)}", [text_part(said.text, logprobs)]))
    items += [call_item(f"fc_{id}_{len(items) + number}", call) for number, call in enumerate(said.calls)]
    if said.cut:
        items[-1].status = "incomplete"
    return items


def kept(id: str, policy: str, node: Node, created: int) -> ResponsesAnswer:
    """Return the response of an earlier answer of a session."""
    (body,) = (message.body for message in node.messages)
    calls = [
        ToolCall(call["id"], call["function"]["name"], text if isinstance(text, str) else dump_object(text))
        for call in body.get("tool_calls", ())
        for text in [call["function"]["arguments"]]
    ]
    cut, completed = node.finish == "length", len(node.tokens)
    said = _Said(body.get(REASONING, ""), body["content"], calls, cut=cut)
    prompt = sum(len(above.tokens) for above in node.path()) - completed
    shown = ResponsesAnswer(
        id=f"resp_{id}",
        created_at=created,
        status="completed",
        model=policy,
        output=[],
        metadata={},
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[],
    )
    _end(shown, _output(id, said, []), prompt, completed, cut=cut)
    return shown


def _end(shown: ResponsesAnswer, output: list[OutputItem], prompt: int, completed: int, *, cut: bool) -> None:
    """Fill in what is known at the end of an answer."""
    shown.output = output
    if cut:
        shown.status, shown.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
    shown.usage = ResponsesUsage(
        input_tokens=prompt,
        input_tokens_details={"cached_tokens": 0},
        output_tokens=completed,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=prompt + completed,
    )


def _response(request: ResponsesRequest, answer: Answer, status: Status) -> ResponsesAnswer:
    """Return a response without output. Clients expect every field."""
    sampling = answer.choices[0].request.sampling
    return ResponsesAnswer(
        id=f"resp_{answer.id}",
        created_at=answer.created,
        status=status,
        model=request.model,
        output=[],
        instructions=request.instructions,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_p=sampling.top_p,
        background=False,
        max_output_tokens=request.max_output_tokens,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning or {"effort": None, "summary": None},
        store=request.store is not False,
        text={"format": _form(request) or {"type": "text"}},
        truncation=request.truncation or "disabled",
        user=request.user,
    )


# ---------------------------------------------------------------- the stream


async def stream(request: ResponsesRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    """Yield events while the engine samples. The first comes with the first piece; a later error fails the response."""
    events = ResponseEvents(answer.id, renderer)
    begun = False
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    yield events.life("created", _response(request, answer, "in_progress"))
                    yield events.life("in_progress", _response(request, answer, "in_progress"))
                yield events.take(piece)
    except Exception as error:
        if not begun:
            raise
        failed = _response(request, answer, "failed")
        failed.output, failed.error = events.output, _failure(error)
        yield events.life("failed", failed)
        return
    ended, cut = _response(request, answer, "completed"), answer.choices[0].finish == "length"
    _end(ended, events.output, answer.prompt_tokens, answer.completion_tokens, cut=cut)
    yield events.life(ended.status, ended)


def _failure(error: Exception) -> ResponseError:
    known = error if isinstance(error, RillflowError) else EngineError(f"{type(error).__name__}: {error}")
    code = "rate_limit_exceeded" if known.status == 429 else "server_error"
    return ResponseError(code=code, message=known.message)


def error_body(error: RillflowError) -> ErrorAnswer:
    return openai.error_body(error, prompt="input")


def error_event(error: RillflowError) -> bytes:
    """Return the last event of a stream that fails before its response began.

    It has the fields of the documented event, and the `error` that makes clients raise it.
    """
    said = error_body(error).error
    shown = {"type": "error", "code": said.code or said.type, "message": said.message, "param": said.param}
    return named_event(shown | {"error": said})

"""The OpenAI responses dialect: its request to a `Call`, an `Answer` to its response or its stream.

`previous_response_id` names an earlier answer of the same session, found in the session's trees: nothing else is
stored, and `store` changes nothing; a response that is retrieved has what was said and null for what was asked. The
instructions of that earlier call are not carried over. Tools that the provider would run itself are left out of the
prompt: only functions can be called here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import EngineError, RillflowError
from rillflow.gateway.calls import Answer, Call
from rillflow.gateway.dialects import openai
from rillflow.gateway.dialects.items import Item, call_item, message_item, messages_of, reasoning_item, text_part
from rillflow.gateway.dialects.openai import (
    Distortions,
    NonNegative,
    Positive,
    Share,
    Temperature,
    ToolChoice,
    TopK,
    logprob_entries,
    read,
    refuse_distortions,
    sampled,
    sampling,
    tokens_within,
    within,
)
from rillflow.gateway.dialects.response_events import ResponseEvents
from rillflow.gateway.dialects.sse import named_event
from rillflow.gateway.dialects.structured import allowed, checked_type, forced, formatted
from rillflow.gateway.failures import CallRefused
from rillflow.gateway.trees.continuing import INSTRUCTIONS
from rillflow.gateway.trees.messages import Message, ToolCall, dump_object, message
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
        raise CallRefused("an input is needed", param="input")
    if request.top_logprobs:
        raise CallRefused("only the sampled token's log-prob is known", param="top_logprobs")
    if request.background:
        raise CallRefused("a response is answered on the connection that asked for it", param="background")
    if request.conversation is not None:
        raise CallRefused("send the items, or name the previous response", param="conversation")
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
    """In the shape of chat completions, so that the model sees the same prompt through either dialect."""
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
    return msgspec.json.encode(_ended(request, answer, _output(answer.id, said, logprobs)))


class _Said(NamedTuple):
    """What an answer comes to; `cut`: its length was."""

    reasoning: str
    text: str
    calls: Sequence[ToolCall]
    cut: bool


def _output(id: str, said: _Said, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append(reasoning_item(f"rs_{id}_0", said.reasoning))
    if said.text or not (said.calls or said.reasoning):
        items.append(message_item(f"msg_{id}_{len(items)}", [text_part(said.text, logprobs)]))
    items += [call_item(f"fc_{id}_{len(items) + number}", call) for number, call in enumerate(said.calls)]
    if said.cut:
        items[-1]["status"] = "incomplete"
    return items


def kept(id: str, policy: str, node: Node, created: int) -> dict[str, Any]:
    """Return the response of an answer that a session keeps, for those who retrieve it."""
    (body,) = (message.body for message in node.messages)
    calls = [
        ToolCall(call["id"], call["function"]["name"], text if isinstance(text, str) else dump_object(text))
        for call in body.get("tool_calls", ())
        for text in [call["function"]["arguments"]]
    ]
    cut, completed = node.finish == "length", len(node.tokens)
    said = _Said(body.get("reasoning_content", ""), body["content"], calls, cut=cut)
    prompt = sum(len(above.tokens) for above in node.path()) - completed
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": policy,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        **_result(_output(id, said, []), prompt, completed, cut=cut),
    }


def _ended(request: ResponsesRequest, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.choices[0].finish == "length"
    result = _result(output, answer.prompt_tokens, answer.completion_tokens, cut=cut)
    return _response(request, answer, "incomplete" if cut else "completed") | result


def _result(output: list[dict[str, Any]], prompt: int, completed: int, *, cut: bool) -> dict[str, Any]:
    return {
        "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completed,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completed,
        },
    }


def _response(request: ResponsesRequest, answer: Answer, status: str) -> dict[str, Any]:
    """A response that holds nothing yet; clients expect every field."""
    sampling = answer.choices[0].request.sampling
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": request.reasoning or {"effort": None, "summary": None},
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": _form(request) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": sampling.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


# ---------------------------------------------------------------- the stream


async def stream(request: ResponsesRequest, answer: Answer, renderer: Renderer) -> AsyncGenerator[bytes]:
    """The first event comes once something is known to have been sampled; an engine's error is told as a failed
    response after that."""
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
        yield events.life("failed", _response(request, answer, "failed") | _failure(error, events.output))
        return
    ended = _ended(request, answer, events.output)
    yield events.life(ended["status"], ended)


def _failure(error: Exception, output: list[dict[str, Any]]) -> dict[str, Any]:
    known = error if isinstance(error, RillflowError) else EngineError(f"{type(error).__name__}: {error}")
    code = "rate_limit_exceeded" if known.status == 429 else "server_error"
    return {"output": output, "error": {"code": code, "message": known.message}}


def error_body(error: RillflowError) -> dict[str, Any]:
    return openai.error_body(error, prompt="input")


def error_event(error: RillflowError) -> bytes:
    """How a stream says that it was cut, or failed before its response began: with the fields of the documented event,
    and with the `error` that makes clients raise it."""
    said = error_body(error)["error"]
    code = said["code"] or said["type"]
    shown = {"type": "error", "code": code, "message": said["message"], "param": said["param"], "error": said}
    return named_event(shown)

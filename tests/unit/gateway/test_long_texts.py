"""Long texts do not delay other sessions, and texts that cannot fit are refused in every field."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from gateway_support import CHATML, make_tokenizer, says
from msgspec import inspect
from serving import Served, served, until

from rillflow.gateway import Renderer
from rillflow.gateway.dialects import chat, completions, messages, responses
from rillflow.gateway.trees import tokens
from rillflow.gateway.trees.messages import message
from rillflow.gateway.trees.tokens import encode_apart

LONG = "hello " * 4000  # long enough for a thread
MARK = "the long text"


class Tokenising(Renderer):
    """A renderer whose tokenizer stops at a text with the mark until the test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.waited_in_vain = False
        self.longest = 0
        super().__init__(make_tokenizer(CHATML))

    def encode(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        if MARK in text:
            self.begun.set()
            self.waited_in_vain |= not self.go_on.wait(60)
        return super().encode(text)

    def _text(self, messages: Any, tools: Any, *, prompt: bool) -> str:
        text = super()._text(messages, tools, prompt=prompt)
        self.longest = max(self.longest, len(text))
        return text


@asynccontextmanager
async def slow_gateway(context: int = 1 << 20) -> AsyncIterator[tuple[Served, Tokenising]]:
    async with served() as gateway:
        renderer = Tokenising()
        policies = gateway.gateway._policies
        policies["policy"].renderer = renderer
        gateway.engine.context = context
        try:
            yield gateway, renderer
        finally:
            renderer.go_on.set()


TEXT = f"{MARK} {LONG}"
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"text": TEXT})}}
TOOL = {"name": "f", "description": TEXT, "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hello"}
LONG_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "message": (chat.PATH, {"messages": [{"role": "user", "content": TEXT}]}),
    "stream": (chat.PATH, {"messages": [{"role": "user", "content": TEXT}], "stream": True}),
    "arguments": (
        chat.PATH,
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "done"}]},
    ),
    "tools": (chat.PATH, {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]}),
    "prompt": (completions.PATH, {"prompt": TEXT}),
    "input": (responses.PATH, {"input": TEXT}),
    "turn": (messages.PATH, {"max_tokens": 5, "messages": [{"role": "user", "content": TEXT}]}),
    "count": (messages.COUNT_PATH, {"messages": [{"role": "user", "content": TEXT}]}),
    "input_tokens": (responses.COUNT_PATH, {"input": TEXT}),
}


@pytest.mark.parametrize("form", LONG_BODIES)
async def test_others_are_answered_while_a_long_text_is_tokenised(form: str) -> None:
    path, body = LONG_BODIES[form]
    async with slow_gateway() as (gateway, renderer):
        other = gateway.gateway.sessions.open("s2", seed=1, group="g", deadline_seconds=60)
        gateway.engine.choose = lambda request: says(renderer, "abc")
        long = asyncio.create_task(gateway.call("POST", path, json={"model": "policy"} | body))
        await until(renderer.begun.is_set)
        asked = {"model": "policy", "messages": [USER]}
        status, answer, _ = await gateway.call("POST", chat.PATH, key=other, json=asked)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "abc")
        assert not long.done()
        assert not renderer.waited_in_vain, "the loop stood still"
        renderer.go_on.set()
        status, answer, _ = await long
        assert status == 200, answer


async def test_calls_of_a_session_are_placed_in_the_order_in_which_they_came() -> None:
    async with slow_gateway() as (gateway, renderer):
        gateway.engine.choose = lambda request: says(renderer, "abc")
        first = asyncio.create_task(
            gateway.call("POST", chat.PATH, json={"model": "policy"} | LONG_BODIES["message"][1])
        )
        await until(renderer.begun.is_set)
        second = asyncio.create_task(gateway.call("POST", chat.PATH, json={"model": "policy", "messages": [USER]}))
        session = gateway.gateway.sessions.get("s1")
        await until(lambda: bool(session.turn._waiters))
        renderer.go_on.set()
        assert [(await call)[0] for call in (first, second)] == [200, 200]
        long, short = (len(request.tokens) for request in gateway.engine.requests)
        assert long > short


async def test_a_client_that_goes_leaves_its_sessions_turn_to_the_thread() -> None:
    """Otherwise a client that connects and disconnects in a loop would occupy all threads."""
    async with slow_gateway() as (gateway, renderer):
        gone = asyncio.create_task(
            gateway.call("POST", chat.PATH, json={"model": "policy"} | LONG_BODIES["message"][1])
        )
        await until(renderer.begun.is_set)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        session = gateway.gateway.sessions.get("s1")
        (task,) = session.at_work
        await until(lambda: bool(task.cancelling()))
        assert session.turn.locked()
        renderer.go_on.set()
        await until(lambda: not session.at_work)
        assert not session.turn.locked()
        assert gateway.engine.requests == []
        gateway.script("abc")
        assert (await gateway.call("POST", chat.PATH, json={"model": "policy", "messages": [USER]}))[0] == 200
        assert not renderer.waited_in_vain


async def test_an_answer_that_is_abandoned_while_a_call_behind_it_is_rendered_is_not_continued() -> None:
    async with slow_gateway() as (gateway, renderer):
        gateway.engine.choose = lambda request: says(renderer, "abc")
        await gateway.call("POST", chat.PATH, json={"model": "policy", "messages": [USER]})
        (answer,) = (
            node for node in gateway.gateway.sessions.get("s1").trees["policy"].nodes() if node.kind == "sampled"
        )
        history = [USER, {"role": "assistant", "content": "abc"}, {"role": "user", "content": TEXT}]
        long = asyncio.create_task(gateway.call("POST", chat.PATH, json={"model": "policy", "messages": history}))
        await until(renderer.begun.is_set)
        answer.abandon()
        renderer.go_on.set()
        assert (await long)[0] == 200
        assert answer.children == []


def test_a_text_that_is_tokenised_in_a_process_of_its_own_has_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(make_tokenizer(CHATML))
    text = "hello abc <|im_start|> \u00e4\U0001f600\n\n " * 20
    assert encode_apart(make_tokenizer(CHATML).backend_tokenizer.to_str(), text).tolist() == renderer.encode(text)
    said = [message("user", text)]
    here = renderer.first(said, None, b"").tokens
    renderer._prompts.clear()
    monkeypatch.setattr(tokens, "_APART", 16)
    calls: list[str] = []
    monkeypatch.setattr(tokens, "encode_apart", lambda *given: calls.append(given[1]) or encode_apart(*given))
    assert renderer.first(said, None, b"").tokens == here
    assert len(calls) == 1


def test_a_process_that_tokenises_and_fails_says_why() -> None:
    with pytest.raises(ChildProcessError, match=r"failed \(1\): .*expected"):
        encode_apart("not a tokenizer", "text")


# ---------------------------------------------------------------- what cannot fit


CONTEXT = 64
GIANT = "hello" * 2000
Spots = Iterator[tuple[str, Any]]


def spots(kind: inspect.Type) -> Spots:
    """Every place of a type in which a client may put text: its path, and a value that has the giant there."""
    if isinstance(kind, inspect.StrType | inspect.AnyType):
        yield "", GIANT
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from spots(one)
    elif isinstance(kind, inspect.ListType):
        yield from ((f"[]{path}", [value]) for path, value in spots(kind.item_type))
    elif isinstance(kind, inspect.DictType):
        yield ".key", {GIANT: smallest(kind.value_type)}
        yield from ((f".value{path}", {"a": value}) for path, value in spots(kind.value_type))
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            for path, value in spots(field.type):
                yield f".{field.encode_name}{path}", smallest(kind) | {field.encode_name: value}


def smallest(kind: inspect.Type) -> Any:
    """A valid value of a type, with as little in it as can be."""
    if isinstance(kind, inspect.UnionType):
        return smallest(kind.types[0])
    if isinstance(kind, inspect.LiteralType):
        return "user" if "user" in kind.values else kind.values[0]
    if isinstance(kind, inspect.ListType):
        return [smallest(kind.item_type)] * (kind.min_length or 0)
    if isinstance(kind, inspect.StructType):
        tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
        return tag | {field.encode_name: smallest(field.type) for field in kind.fields if field.required}
    simple: dict[Any, Any] = {inspect.DictType: {}, inspect.IntType: 1, inspect.FloatType: 1.0, inspect.BoolType: True}
    return simple.get(type(kind), "a")


REQUESTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    chat.PATH: (chat.ChatRequest, {"messages": [USER]}),
    completions.PATH: (completions.CompletionRequest, {"prompt": "hello"}),
    responses.PATH: (responses.ResponsesRequest, {"input": "hello"}),
    responses.COUNT_PATH: (responses.ResponsesRequest, {"input": "hello"}),
    messages.PATH: (messages.MessagesRequest, {"messages": [USER], "max_tokens": 5}),
    messages.COUNT_PATH: (messages.CountRequest, {"messages": [USER]}),
}
# Fields that are refused whatever they hold, before their length is looked at.
NEVER_READ = {
    chat.PATH: ("functions", "logit_bias", "bad_words", "chat_template"),
    completions.PATH: ("suffix", "logit_bias", "bad_words"),
    responses.PATH: ("conversation", "logit_bias", "bad_words"),
    responses.COUNT_PATH: ("conversation", "logit_bias", "bad_words"),
    messages.PATH: (),
    messages.COUNT_PATH: (),
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_text_that_cannot_fit_is_refused_in_every_field_before_it_is_rendered(path: str) -> None:
    request, plain = REQUESTS[path]
    unread: set[str] = set()
    tried = 0
    async with slow_gateway(context=CONTEXT) as (gateway, renderer):
        assert renderer.characters_of(CONTEXT) < len(GIANT)
        before = renderer.longest
        for field in msgspec.structs.fields(request):
            for spot, value in spots(inspect.type_info(field.type)):
                if field.name == "model":
                    continue
                status, answer, _ = await gateway.call(
                    "POST", path, json={"model": "policy"} | plain | {field.name: value}
                )
                assert status == 400, (field.name, spot, answer)
                tried += 1
                if f"this model's context is {CONTEXT} tokens" not in answer["error"]["message"]:
                    unread.add(field.name)
        assert renderer.longest == before, "rendered or tokenised"
        assert gateway.engine.requests == []
    assert unread == set(NEVER_READ[path])
    assert tried > 10


async def test_the_refusal_has_the_form_of_each_dialect() -> None:
    async with slow_gateway(context=CONTEXT) as (gateway, _):
        turn = {"role": "user", "content": GIANT}
        for path, body, param in (
            (chat.PATH, {"messages": [turn]}, "messages"),
            (completions.PATH, {"prompt": GIANT}, "prompt"),
            (completions.PATH, {"prompt": [1] * CONTEXT}, "prompt"),
            (responses.PATH, {"input": GIANT}, "input"),
        ):
            status, answer, _ = await gateway.call("POST", path, json={"model": "policy"} | body)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        for path in (messages.PATH, messages.COUNT_PATH):
            body = {"model": "policy", "max_tokens": 1, "messages": [turn]}
            status, answer, _ = await gateway.call("POST", path, json=body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert answer["error"]["message"].startswith("prompt is too long: ")

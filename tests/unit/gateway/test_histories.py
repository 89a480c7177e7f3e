"""Histories and endings that agents really produce and that are easy to get wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_bench import HandClock, running
from gateway_support import CHATML, ScriptedEngine, chunk, make_renderer

from rillflow.contracts import SystemClock
from rillflow.gateway import Gateway, Sessions
from rillflow.gateway.answers import Answer
from rillflow.gateway.calls import Call, Policy, begin
from rillflow.gateway.lifetime import streamed
from rillflow.gateway.trees.matching import Place
from rillflow.gateway.trees.messages import Message, message
from rillflow.gateway.trees.record import samples
from rillflow.gateway.trees.tree import Node, TokenTree
from rillflow.types import Sampling
from rillflow.wire.messages import Request

RENDERER = make_renderer()
USER, NEXT = message("user", "hello"), message("user", "go on")
# Writes every system message at the top, wherever it stands, as DeepSeek's templates do.
HOISTING = "{%- for m in messages if m.role == 'system' %}{{ m.content ~ '\n' }}{% endfor -%}" + CHATML.replace(
    "{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}"
)


def answered(tree: TokenTree, given: Node, text: str) -> Message:
    reply = message("assistant", text)
    node = tree.sample(given, 1.0)
    node.add(chunk([*RENDERER.encode(text), RENDERER.end_token or 0]))
    node.end("stop", reply)
    return reply


def test_a_history_that_ends_with_the_answer_can_be_asked_again() -> None:
    tree = TokenTree()
    reply = answered(tree, Place(tree, RENDERER, [USER], None, b"").give(), "abc")
    again = Place(tree, RENDERER, [USER, reply], None, b"").give()
    assert Place(tree, RENDERER, [USER, reply], None, b"").give() is again
    more = answered(tree, again, "def")
    last = Place(tree, RENDERER, [USER, reply, more, NEXT], None, b"").give()
    assert last.prompt()[: len(again.prompt())] == again.prompt()
    answered(tree, last, "end")
    (row,) = samples("p", tree)
    assert row.trained == sum(len(RENDERER.encode(text)) + 1 for text in ("abc", "def", "end"))


def test_a_late_system_message_that_the_template_moves_forks() -> None:
    renderer = make_renderer(HOISTING)
    assert renderer.append_only
    tree = TokenTree()
    reply = answered(tree, Place(tree, renderer, [USER], None, b"").give(), "abc")
    history = [USER, reply, message("system", "be brief"), NEXT]
    given = Place(tree, renderer, history, None, b"").give()
    bodies = [m.body for m in history]
    whole = renderer._tokenizer.apply_chat_template(bodies, tokenize=False, add_generation_prompt=True)
    assert renderer.decode(given.prompt()) == whole
    assert given.fork == "template"


def test_an_answer_that_was_built_on_was_seen() -> None:
    tree = TokenTree()
    given = Place(tree, RENDERER, [USER], None, b"").give()
    reply = answered(tree, given, "abc")
    answered(tree, Place(tree, RENDERER, [USER, reply, NEXT], None, b"").give(), "def")
    node = given.children[0]
    node.abandon()
    assert node.usable
    assert Place(tree, RENDERER, [USER, reply, message("user", "other")], None, b"").give().parent is node


# ---------------------------------------------------------------- calls


def call(**arguments: Any) -> Call:
    return Call("p", [USER], None, b"", Sampling(max_tokens=40), **arguments)


@pytest.mark.parametrize("step", [1, 3, 100])
async def test_what_follows_a_stop_string_is_not_kept_however_the_engine_chunks(step: int) -> None:
    ids = RENDERER.encode("one END two three")
    script: Any = [chunk(ids[at : at + step]) for at in range(0, len(ids), step)]
    sessions = Sessions("secret")
    sessions.open("s", seed=1, group="g", deadline_seconds=60)
    policy = Policy(ScriptedEngine([script]), RENDERER)
    answer = begin(sessions.get("s"), policy, call(stops=("END",)), "c1", 0)
    await answer.whole()
    node = answer.choices[0].node
    assert RENDERER.decode(node.tokens) == "one END"
    assert len(node.tokens) == len(node.logprobs) == len(node.raw_logprobs) == len(node.versions)
    assert (answer.choices[0].text, node.finish) == ("one ", "stop")


async def test_a_session_closed_before_its_stream_has_begun_hangs_nobody() -> None:
    sessions = Sessions("secret")
    sessions.open("s", seed=1, group="g", deadline_seconds=60)
    session = sessions.get("s")

    async def begun() -> Answer:
        return begin(session, Policy(ScriptedEngine([[None]]), RENDERER), call(live=True), "c1", 0)

    async def events(answer: Answer) -> Any:
        async for _ in answer.pieces():
            yield b"x"

    request = Request("POST", "/v1/chat/completions", "", {})
    waiting = asyncio.create_task(
        streamed(begun, events, session, request, SystemClock(), shape=lambda error: b"error")
    )
    await asyncio.sleep(0)  # the call is at work, but its task has not had its first turn
    assert session.at_work
    sessions.close("s")
    with pytest.raises(Exception, match="not open"):
        await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("end", ["close", "deadline"])
async def test_a_stream_that_is_cut_says_why(end: str) -> None:
    clock = HandClock()
    async with running(clock=clock) as bench:
        gateway: Gateway = bench.gateway
        key = gateway.sessions.open("s2", seed=1, group="g", deadline_seconds=0.3)
        bench.engine.scripts.append([chunk(RENDERER.encode("some")), None])
        client = bench.client.with_options(base_url=f"{bench.url}/v1", api_key=key)
        stream: Any = await client.chat.completions.create(model="policy", messages=[USER.body], stream=True)

        async def read() -> None:
            async for event in stream:
                if not event.choices[0].delta.content:
                    continue
                if end == "close":
                    gateway.sessions.close("s2")
                else:
                    clock.time += 1.0

        with pytest.raises(Exception, match="not open" if end == "close" else "deadline"):
            await read()

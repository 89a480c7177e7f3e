"""Refusals of the gateway over real HTTP, and early ends of calls and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from gateway_bench import RENDERER, TOKEN, TOOLS, USER, Bench, HandClock, running, until
from gateway_support import CHATML, FORGETFUL, PLAIN, ScriptedEngine, chunk, make_renderer, make_tokenizer, says

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import ConfigError, ContextOverflow, QueueFull
from rillflow.gateway import Gateway, Policy
from rillflow.gateway.trees.template import ChatTemplate


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running() as made:
        yield made


# ---------------------------------------------------------------- refusals


async def test_an_unknown_model(bench: Bench) -> None:
    with pytest.raises(openai.NotFoundError, match="policy") as caught:
        await bench.client.chat.completions.create(model="gpt", messages=[USER])
    assert caught.value.code == "model_not_found"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"stop": [3]}, "stop[0]"),
    ({"tools": {}}, "tools"),
    ({"top_logprobs": 2}, "top_logprobs"),
]


async def test_wrong_fields_are_named(bench: Bench) -> None:
    for change, param in WRONG:
        body = {"model": "policy", "messages": [USER]} | change
        status, answer, _ = await bench.raw("/s/s1/v1/chat/completions", body, bench.key)
        assert status == 400, change
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"] == param


async def test_a_body_that_is_not_json(bench: Bench) -> None:
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bench.key}"}) as http:
        for data in (b"{", b"\xff", b'{"model":' + b"[" * 100_000):
            async with http.post(f"{bench.url}/v1/chat/completions", data=data) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"


LIMITS = GatewayConfig(body=4000, messages=3, tools=2, choices=2, stops=2, calls=20)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("messages", USER, 3), ("tools", TOOLS[0], 2), ("stop", "x", 2)],
)
async def test_limits(field: str, value: Any, limit: int) -> None:
    async with running(limits=LIMITS) as bench:
        body = {"model": "policy", "messages": [USER]}
        bench.script("a")
        assert (await bench.raw("/v1/chat/completions", body | {field: [value] * limit}, bench.key))[0] == 200
        status, answer, _ = await bench.raw("/v1/chat/completions", body | {field: [value] * (limit + 1)}, bench.key)
        assert (status, answer["error"]["param"]) == (400, field)


async def test_limits_of_choices_body_and_calls() -> None:
    async with running(limits=LIMITS) as bench:
        bench.script("a", "b")
        await bench.ask(n=2)
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            await bench.ask(n=3)
        with pytest.raises(openai.APIStatusError, match="larger than 4000") as too_large:
            await bench.ask({"role": "user", "content": "x" * 4000})
        assert too_large.value.status_code == 413
        bench.script(*["a"] * 19)
        for _ in range(19):
            await bench.ask()
        with pytest.raises(openai.BadRequestError) as caught:
            await bench.ask()
        assert caught.value.code == "call_limit_exceeded"


async def test_context_overflow(bench: Bench) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await bench.ask({"role": "user", "content": "x" * 5000})
    assert caught.value.code == "context_length_exceeded"
    assert bench.engine.requests == []
    bench.engine.scripts.append([ContextOverflow("too long")])
    with pytest.raises(openai.BadRequestError) as caught:
        await bench.ask(stream=True)
    assert caught.value.code == "context_length_exceeded"


async def test_an_answer_is_asked_for_only_as_long_as_there_is_room(bench: Bench) -> None:
    bench.script("a")
    await bench.ask({"role": "user", "content": "x" * 4050})
    (request,) = bench.engine.requests
    assert len(request.tokens) + request.sampling.max_tokens == 4096


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_back(bench: Bench, stream: bool) -> None:
    bench.engine.scripts.append([QueueFull("full")])
    body = {"model": "policy", "messages": [USER], "stream": stream}
    status, answer, headers = await bench.raw("/v1/chat/completions", body, bench.key)
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert headers["retry-after"] == "1"
    bench.script("a")
    await bench.ask()
    refused, served = bench.engine.requests
    assert refused.sampling.seed == served.sampling.seed


async def test_concurrent_calls_are_bounded() -> None:
    async with running(limits=GatewayConfig(concurrent=2, waiting=1)) as bench:
        bench.engine.scripts += [[None, *says(RENDERER, "a")] for _ in range(3)]
        calls = [asyncio.create_task(bench.ask()) for _ in range(3)]
        session = bench.gateway.sessions.get("s1")
        await until(lambda: len(session.at_work) == 3)
        with pytest.raises(openai.RateLimitError, match="2 running and 1 waiting calls"):
            await bench.ask()
        assert len(bench.engine.requests) == 2
        bench.engine.gate.set()
        await asyncio.gather(*calls)
        bench.script("b")
        await bench.ask()


async def test_an_engines_error_is_a_500(bench: Bench) -> None:
    bench.engine.scripts.append([RuntimeError("broken")])
    with pytest.raises(openai.InternalServerError, match="broken"):
        await bench.ask()


async def test_an_engine_that_stops_is_unavailable(bench: Bench) -> None:
    bench.engine.scripts += [[chunk([1, 2], finish="abort")], [chunk([3, 4])]]
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as caught:
            await bench.ask()
        assert caught.value.status_code == 503
    assert [row.trained for row in bench.gateway.sessions.close("s1").samples("policy")] == [2, 2]


async def test_a_template_that_refuses_is_the_agents_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = ChatTemplate(make_tokenizer(CHATML + "{{ raise_exception('roles must alternate') if messages[1:] }}"))
    monkeypatch.setattr(RENDERER, "template", refusing)
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        await bench.ask({"role": "user", "content": "not"}, {"role": "user", "content": "rendered before"})


async def test_options_of_the_chat_template_for_one_call() -> None:
    """They reach the prompt, have paths of their own, and are refused by name where the template has none such."""
    thinking = CHATML + "{%- if add_generation_prompt and thinking is false %}{{ '<think></think>' }}{% endif %}"
    renderer = make_renderer(thinking)
    engine = ScriptedEngine()
    gateway = Gateway(TOKEN, {"policy": Policy(engine, renderer)}, {"policy": SamplingConfig()})
    key = gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=300)
    bench = Bench(gateway, engine, await gateway.start(), key)
    try:
        bench.script("one", "two")
        await bench.ask(extra_body={"chat_template_kwargs": {"thinking": False}})
        await bench.ask()
        prompts = [renderer.decode(request.tokens) for request in engine.requests]
        assert [prompt.endswith("<think></think>") for prompt in prompts] == [True, False]
        tree = gateway.sessions.get("s1").tree("policy")
        assert [node.fork for node in tree.nodes() if node.kind == "given"] == ["", "history"]
        with pytest.raises(openai.BadRequestError, match="no option 'thinkin'"):
            await bench.ask(extra_body={"chat_template_kwargs": {"thinkin": False}})
        with pytest.raises(openai.BadRequestError, match="set the chat template in the recipe"):
            await bench.ask(extra_body={"chat_template": "{{ 1 }}"})
    finally:
        await bench.client.close()
        await gateway.stop()


async def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    engine = ScriptedEngine()
    gateway = Gateway(TOKEN, {"policy": Policy(engine, make_renderer(PLAIN))}, {"policy": SamplingConfig()})
    key = gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=300)
    bench = Bench(gateway, engine, await gateway.start(), key)
    try:
        with pytest.raises(openai.BadRequestError, match=r"set policies\.policy\.tools"):
            await bench.ask(tools=TOOLS)
    finally:
        await bench.client.close()
        await gateway.stop()


async def test_calls_that_cannot_be_parsed_are_counted(bench: Bench) -> None:
    bench.script("<tool_call>oops</tool_call>")
    said = await bench.ask(tools=TOOLS)
    assert said.choices[0].message.content == "<tool_call>oops</tool_call>"
    assert bench.gateway.sessions.get("s1").unparsed_calls == 1


def test_policies_must_be_named_alike() -> None:
    with pytest.raises(ConfigError):
        Gateway(TOKEN, {"a": Policy(ScriptedEngine(), RENDERER)}, {"b": SamplingConfig()})


# ---------------------------------------------------------------- going, closing, deadlines


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_aborts_its_generation(bench: Bench, stream: bool) -> None:
    bench.engine.scripts.append([chunk(RENDERER.encode("some")), None, chunk([1])])
    call = asyncio.create_task(read_all(bench, stream))
    await asyncio.wait_for(bench.engine.waiting.wait(), 60)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: bool(bench.engine.aborted))
    record = bench.gateway.sessions.close("s1")
    assert record.samples("policy") == []
    nodes = list(record.trees["policy"].nodes())
    assert nodes[-1].abandoned
    assert list(nodes[-1].tokens) == RENDERER.encode("some")


async def read_all(bench: Bench, stream: bool) -> None:
    response = await bench.ask(stream=stream)
    if stream:
        async for _ in response:
            pass


async def test_closing_a_session_cuts_its_calls(bench: Bench) -> None:
    bench.engine.scripts += [says(RENDERER, "done"), [*[chunk([1])] * 20, None]]
    call = asyncio.create_task(bench.ask(n=2))
    await asyncio.wait_for(bench.engine.waiting.wait(), 60)
    assert bench.gateway.sessions.close("s1").samples("policy") == []
    with pytest.raises(openai.NotFoundError):
        await call
    assert len(bench.engine.aborted) == 1


async def test_the_deadline_of_a_session() -> None:
    clock = HandClock()
    async with running(clock=clock) as bench:
        key = bench.gateway.sessions.open("s2", seed=1, group="g1", deadline_seconds=0.1)
        bench.engine.scripts.append([None])
        body = {"model": "policy", "messages": [USER]}
        cut = asyncio.create_task(bench.raw("/v1/chat/completions", body, key))
        await asyncio.wait_for(bench.engine.waiting.wait(), 60)
        clock.time += 1.0
        for call in (cut, bench.raw("/v1/chat/completions", body, key)):
            status, answer, _ = await call
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert len(bench.engine.aborted) == 1


async def test_a_rewriting_template_over_http() -> None:
    async with running(FORGETFUL) as bench:
        bench.script("<think>hm</think>one", "two")
        first = await bench.ask()
        await bench.ask(USER, {"role": "assistant", "content": first.choices[0].message.content}, USER)
        record = bench.gateway.sessions.close("s1")
        assert [row.fork for row in record.samples("policy")] == ["", "template"]
        assert "hm" not in RENDERER.decode(bench.engine.requests[1].tokens)

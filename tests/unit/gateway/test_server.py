"""The gateway over real HTTP with the real OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from gateway_support import CHATML, FORGETFUL, PLAIN, ScriptedEngine, chunk, make_renderer, make_tokenizer, says
from openai import AsyncOpenAI

from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.errors import ConfigError, ContextOverflow, QueueFull
from rillflow.gateway import Gateway, Policy, session_url
from rillflow.gateway.trees.template import ChatTemplate

TOKEN = "the-run-token"
RENDERERS = {template: make_renderer(template) for template in (CHATML, FORGETFUL)}
RENDERER = RENDERERS[CHATML]
CALL = '<tool_call>\n{"name": "count", "arguments": {"box": "red"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
USER: Any = {"role": "user", "content": "hello"}


class Bench:
    """A running gateway with one open session and its client."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, url: str, key: str) -> None:
        self.gateway = gateway
        self.engine = engine
        self.url = url
        self.key = key
        self.client = AsyncOpenAI(base_url=session_url(url, "s1"), api_key=key, max_retries=0, timeout=60)

    def script(self, *texts: str, **arguments: Any) -> None:
        self.engine.scripts += [says(RENDERER, text, **arguments) for text in texts]

    async def ask(self, *messages: Any, **arguments: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=list(messages) or [USER], **arguments)

    async def raw(self, path: str, body: Any, key: str | None) -> tuple[int, dict[str, Any], Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body, headers=headers) as response,
        ):
            return response.status, await response.json(), response.headers


class HandClock:
    time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


@asynccontextmanager
async def running(template: str = CHATML, wins: Any = None, **arguments: Any) -> AsyncIterator[Bench]:
    engine = ScriptedEngine()
    gateway = Gateway(
        TOKEN,
        {"policy": Policy(engine, RENDERERS[template])},
        {"policy": SamplingConfig(temperature=0.7, top_k=5, max_tokens=50, wins=wins)},
        **arguments,
    )
    url = await gateway.start()
    bench = Bench(gateway, engine, url, gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=60))
    try:
        yield bench
    finally:
        await bench.client.close()
        await gateway.stop()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running() as made:
        yield made


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("wins", ["recipe", "agent", None])
async def test_whose_sampling_wins_is_the_recipes_choice(wins: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An agent's temperature of 0 gave groups without variance, and nothing said so."""
    async with running(wins=wins) as bench:
        bench.script("abc", "abc", "abc")
        for settings in ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.7}, {"extra_body": {"top_k": 3}}):
            await bench.ask(max_tokens=3, **settings)
        first, second, third = (request.sampling for request in bench.engine.requests)
        assert {one.max_tokens for one in (first, second, third)} == {3}, "an agent may always ask for less"
        assert second.temperature == 0.7
        if wins == "recipe":
            assert (first.temperature, first.top_p, third.top_k) == (0.7, 1.0, 5)
        else:
            assert (first.temperature, first.top_p, third.top_k) == (0.0, 0.5, 3)
        assert bench.gateway.sessions.get("s1").sampling_overruled == (2 if wins == "recipe" else 0)
        assert caplog.text.count("an agent asked for temperature 0") == (wins == "recipe"), "said once"


async def test_an_answer(bench: Bench) -> None:
    bench.script("abc hello")
    response = await bench.ask()
    choice = response.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abc hello", "stop")
    assert response.id.startswith("chatcmpl-")
    assert response.created > 0
    (request,) = bench.engine.requests
    assert response.usage.prompt_tokens == len(request.tokens)
    assert response.usage.completion_tokens == len(RENDERER.encode("abc hello")) + 1
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    assert request.group == "g1"
    assert request.sampling.stop_tokens == RENDERER.stop_tokens
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.7, 5, 50)
    assert "version" not in response.model_dump_json()


async def test_the_agents_own_sampling_wins(bench: Bench) -> None:
    bench.script("a", "b")
    await bench.ask(temperature=0, top_p=0.5, max_tokens=3, extra_body={"top_k": 0, "anything": {"else": 1}})
    await bench.ask(max_completion_tokens=4, max_tokens=9)
    first, second = (request.sampling for request in bench.engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.0, 0.5, 0, 3)
    assert second.max_tokens == 4


async def test_tools_over_several_turns_are_token_exact(bench: Bench) -> None:
    bench.script(f"I look.\n{CALL}", "12 pens")
    history: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, USER]
    first = await bench.ask(*history, tools=TOOLS)
    said = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert said.content == "I look.\n"
    assert said.tool_calls[0].function.name == "count"
    assert said.tool_calls[0].function.arguments == '{"box": "red"}'
    history += [
        said.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "12"},
    ]
    second = await bench.ask(*history, tools=TOOLS)
    assert second.choices[0].message.content == "12 pens"
    one, two = bench.engine.requests
    sampled = [*RENDERER.encode(f"I look.\n{CALL}"), RENDERER.end_token]
    assert two.tokens[: len(one.tokens) + len(sampled)] == one.tokens + sampled
    (row,) = bench.gateway.sessions.close("s1").samples("policy")
    assert row.columns["tokens"].tolist()[: len(two.tokens)] == two.tokens
    assert row.trained == len(sampled) + len(RENDERER.encode("12 pens")) + 1


async def test_tool_calls_alone_have_no_content(bench: Bench) -> None:
    bench.script(f"{CALL}\n{CALL}")
    choice = (await bench.ask(tools=TOOLS)).choices[0]
    assert choice.message.content is None
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_tool_parsing_can_be_switched_off(bench: Bench) -> None:
    bench.script(CALL, CALL, "<tool_call>{oops</tool_call>")
    assert (await bench.ask(tools=TOOLS, tool_choice="none")).choices[0].message.content == CALL
    assert (await bench.ask()).choices[0].message.content == CALL
    malformed = (await bench.ask(tools=TOOLS)).choices[0]
    assert (malformed.message.content, malformed.finish_reason) == ("<tool_call>{oops</tool_call>", "stop")


async def test_choices_are_siblings(bench: Bench) -> None:
    bench.script("one", "two", "three")
    response = await bench.ask(n=3)
    assert {choice.message.content for choice in response.choices} == {"one", "two", "three"}
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert len({request.sampling.seed for request in bench.engine.requests}) == 3
    record = bench.gateway.sessions.close("s1")
    rows = record.samples("policy")
    assert len(rows) == 3
    prompt = bench.engine.requests[0].tokens
    assert all(row.columns["tokens"].tolist()[: len(prompt)] == prompt for row in rows)
    assert record.calls == 1


async def test_parallel_calls_with_the_same_prompt_are_all_kept(bench: Bench) -> None:
    bench.script("one", "two", "three")
    await asyncio.gather(*(bench.ask() for _ in range(3)))
    assert len({request.sampling.seed for request in bench.engine.requests}) == 3
    assert len(bench.gateway.sessions.close("s1").samples("policy")) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_cut_the_text_and_the_generation(bench: Bench, stream: bool) -> None:
    bench.script("one END two three four five")
    if stream:
        text, finish, _ = await collect(await bench.ask(stop=["END", "never"], stream=True))
    else:
        choice = (await bench.ask(stop="END")).choices[0]
        text, finish = choice.message.content, choice.finish_reason
    assert (text, finish) == ("one ", "stop")
    assert len(bench.engine.aborted) == 1
    bench.script("more")
    await bench.ask(USER, {"role": "assistant", "content": "one "}, USER)
    first, second = bench.engine.requests
    kept = second.tokens[len(first.tokens) :]
    assert RENDERER.decode(kept).startswith("one END")
    (row,) = bench.gateway.sessions.close("s1").samples("policy")
    assert row.columns["tokens"].tolist()[: len(second.tokens)] == second.tokens


async def test_logprobs(bench: Bench) -> None:
    bench.script("abc é")
    content = (await bench.ask(logprobs=True)).choices[0].logprobs.content
    assert "".join(token.token for token in content[:2]) == "abc "
    assert [token.logprob for token in content][:2] == [-0.25, -0.5]
    assert content[0].bytes == list(b"abc")
    assert content[-1].bytes is None
    bench.script("abc é")
    events = [event async for event in await bench.ask(logprobs=True, stream=True)]
    streamed = [
        token for event in events for choice in event.choices if choice.logprobs for token in choice.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in content]


async def test_a_cut_answer(bench: Bench) -> None:
    bench.script("abc", finish="length")
    assert (await bench.ask()).choices[0].finish_reason == "length"
    assert bench.gateway.sessions.close("s1").samples("policy")[0].truncated


# ---------------------------------------------------------------- streams


async def collect(stream: Any) -> tuple[str, str | None, list[tuple[str, str, str]]]:
    text, finish, calls = "", None, []
    async for event in stream:
        for choice in event.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or ():
                if part.id:
                    assert part.function.name
                    assert not part.function.arguments
                    calls.append((part.id, part.function.name, ""))
                else:
                    id, name, arguments = calls[part.index]
                    calls[part.index] = (id, name, arguments + part.function.arguments)
    return text, finish, calls


@pytest.mark.parametrize(
    "text", ["plain", f"look {CALL}\n{CALL}", "日本 🙂 é", "a <tool_call>{oops</tool_call> b <tool"]
)
async def test_a_stream_says_what_a_whole_answer_says(bench: Bench, text: str) -> None:
    bench.script(text, step=1)
    bench.script(text, step=1)
    whole = (await bench.ask(tools=TOOLS)).choices[0]
    said, finish, calls = await collect(await bench.ask(tools=TOOLS, stream=True))
    assert said == (whole.message.content or "")
    assert finish == whole.finish_reason
    assert [call[1:] for call in calls] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()
    ]


async def test_a_stream_streams(bench: Bench) -> None:
    ids = RENDERER.encode("first ")
    bench.engine.scripts.append([chunk(ids), None, *says(RENDERER, "second")])
    stream = await bench.ask(stream=True, stream_options={"include_usage": True})
    events = []
    async for event in stream:
        events.append(event)
        if event.choices and event.choices[0].delta.content:
            bench.engine.gate.set()
    assert bench.engine.waiting.is_set()
    assert len({event.id for event in events}) == 1
    assert events[0].choices[0].delta.role == "assistant"
    assert all(event.usage is None for event in events[:-1])
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(ids) + len(RENDERER.encode("second")) + 1


async def test_choices_stream_side_by_side(bench: Bench) -> None:
    bench.script("one", "two")
    texts = {0: "", 1: ""}
    async for event in await bench.ask(n=2, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    assert set(texts.values()) == {"one", "two"}


async def test_an_error_in_a_stream_travels_in_it(bench: Bench) -> None:
    bench.engine.scripts.append([chunk(RENDERER.encode("ab")), RuntimeError("broken")])
    with pytest.raises(openai.APIError, match="broken"):
        await collect(await bench.ask(stream=True))
    assert bench.gateway.sessions.close("s1").samples("policy") == []


# ---------------------------------------------------------------- who may do what


async def test_models(bench: Bench) -> None:
    assert [model.id async for model in bench.client.models.list()] == ["policy"]


async def test_the_key_alone_finds_its_session(bench: Bench) -> None:
    bench.script("hi")
    async with AsyncOpenAI(base_url=f"{bench.url}/v1", api_key=bench.key, max_retries=0) as client:
        response = await client.chat.completions.create(model="policy", messages=[USER])
    assert response.choices[0].message.content == "hi"
    assert bench.gateway.sessions.close("s1").calls == 1


async def test_the_runs_token_opens_a_session_by_its_path(bench: Bench) -> None:
    bench.script("hi")
    body = {"model": "policy", "messages": [USER]}
    assert (await bench.raw("/s/s1/v1/chat/completions", body, TOKEN))[0] == 200
    assert (await bench.raw("/v1/chat/completions", body, TOKEN))[0] == 400  # of which session?
    assert (await bench.raw("/s/nobody/v1/chat/completions", body, TOKEN))[0] == 404


async def test_no_or_wrong_key(bench: Bench) -> None:
    for path in ("/s/s1/v1/chat/completions", "/v1/chat/completions", "/s/s1/v1/models"):
        for key in (None, "wrong", "s1.00.00", "s1..", ".", "é"):
            status, body, _ = await bench.raw(path, {"model": "policy", "messages": [USER]}, key)
            assert status == 401, (path, key)
            assert body["error"]["code"] == "invalid_api_key"


async def test_another_sessions_key_is_refused(bench: Bench) -> None:
    other = bench.gateway.sessions.open("s2", seed=1, group="g1", deadline_seconds=60)
    status, _, _ = await bench.raw("/s/s1/v1/chat/completions", {"model": "policy", "messages": [USER]}, other)
    assert status == 401
    async with aiohttp.ClientSession() as http:
        for path in ("/metrics", "/health", "/s/s1/other"):
            async with http.get(bench.url + path, headers={"authorization": f"Bearer {other}"}) as response:
                assert response.status == 401


async def test_a_closed_session_is_gone(bench: Bench) -> None:
    bench.gateway.sessions.close("s1")
    with pytest.raises(openai.NotFoundError, match="not open") as caught:
        await bench.ask()
    assert caught.value.code == "session_not_found"
    bench.gateway.sessions.open("s1", seed=7, group="g1", deadline_seconds=60)
    with pytest.raises(openai.NotFoundError):  # the old key does not open the new session
        await bench.ask()


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

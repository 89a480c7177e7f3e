"""The gateway over real HTTP with the real OpenAI client: answers, streams, and who may ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from gateway_bench import CALL, RENDERER, TOKEN, TOOLS, USER, Bench, running
from gateway_support import chunk, says
from openai import AsyncOpenAI


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

"""Anthropic's dialect with the real client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_support import CHATML, chunk
from openai import AsyncOpenAI
from serving import TOKEN, Served, served, until

from rillflow.config import GatewayConfig
from rillflow.errors import ContextOverflow, QueueFull
from rillflow.gateway import anthropic_url, session_url

CALL = '<tool_call>\n{"name": "count", "arguments": {"box": "red"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]}
TOOLS: list[Any] = [{"name": "count", "description": "Counts.", "input_schema": SCHEMA}]
USER: Any = {"role": "user", "content": "hello"}
# A template of a model that reasons: text between the markers is thinking.
THINKING = CHATML + "{#- </think> -#}"


class Agent:
    """The client of a running gateway's session."""

    def __init__(self, bench: Served) -> None:
        import anthropic

        self.bench = bench
        self.client = anthropic.AsyncAnthropic(
            base_url=anthropic_url(bench.url, "s1"), api_key=bench.key, max_retries=0, timeout=60
        )

    async def ask(self, *messages: Any, **arguments: Any) -> Any:
        return await self.client.messages.create(**self.body(*messages, **arguments))

    def body(self, *messages: Any, **arguments: Any) -> Any:
        return {"model": "policy", "max_tokens": 40, "messages": list(messages) or [USER]} | arguments

    async def events(self, **arguments: Any) -> tuple[list[Any], Any]:
        """Return the events of the stream helper and the message that it builds."""
        async with self.client.messages.stream(**self.body(**arguments)) as stream:
            seen = [event async for event in stream]
            return seen, await stream.get_final_message()


@pytest.fixture
async def bench() -> AsyncIterator[Served]:
    async with served() as made:
        yield made


@pytest.fixture
async def agent(bench: Served) -> AsyncIterator[Agent]:
    made = Agent(bench)
    yield made
    await made.client.close()


# ---------------------------------------------------------------- answers


async def test_an_answer(agent: Agent, bench: Served) -> None:
    bench.script("abc hello")
    more = {"top_k": 3, "top_p": 0.5, "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "else": [1]}
    said = await agent.ask(system="be brief", extra_body=more)
    assert said.id.startswith("msg_")
    assert (said.type, said.role, said.model) == ("message", "assistant", "policy")
    assert [block.text for block in said.content] == ["abc hello"]
    assert (said.stop_reason, said.stop_sequence) == ("end_turn", None)
    (request,) = bench.engine.requests
    assert said.usage.input_tokens == len(request.tokens)
    assert said.usage.output_tokens == len(bench.renderer.encode("abc hello")) + 1
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 0.5, 3, 40)


async def test_the_prompt_is_the_one_of_the_openai_dialect(agent: Agent, bench: Served) -> None:
    """System, tools, calls and results: the model cannot tell which client asked."""
    bench.script("one", "two")
    call = {"type": "tool_use", "id": "t1", "name": "count", "input": {"box": "red"}}
    await agent.ask(
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look.\n"}, call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "12"}]},
                {"type": "text", "text": "and "},
                {"type": "text", "text": "now?"},
            ],
        },
        {"role": "system", "content": "be quick"},
        system=[
            {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        tools=TOOLS,
    )
    function = {"name": "count", "description": "Counts.", "parameters": SCHEMA}
    async with AsyncOpenAI(base_url=session_url(bench.url, "s1"), api_key=bench.key, max_retries=0) as client:
        messages: list[Any] = [
            {"role": "system", "content": "be brief"},
            USER,
            {
                "role": "assistant",
                "content": "I look.\n",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "count", "arguments": '{"box": "red"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "12"},
            {"role": "user", "content": "and now?"},
            {"role": "system", "content": "be quick"},
        ]
        tools: list[Any] = [{"type": "function", "function": function}]
        await client.chat.completions.create(model="policy", messages=messages, tools=tools)
    first, second = bench.engine.requests
    assert first.tokens == second.tokens
    assert first.sampling.seed != second.sampling.seed  # the same prompt again is another draw


async def test_tools_over_several_turns_are_token_exact(agent: Agent, bench: Served) -> None:
    bench.script(f"I look.\n{CALL}", "12 pens")
    first = await agent.ask(tools=TOOLS, tool_choice={"type": "any"})
    text, use = first.content
    assert first.stop_reason == "tool_use"
    assert text.text == "I look.\n"
    assert (use.type, use.name, use.input) == ("tool_use", "count", {"box": "red"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12"}
    history = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await agent.ask(*history, tools=TOOLS)
    assert second.content[0].text == "12 pens"
    one, two = bench.engine.requests
    sampled = [*bench.renderer.encode(f"I look.\n{CALL}"), bench.renderer.end_token]
    assert two.tokens[: len(one.tokens) + len(sampled)] == one.tokens + sampled
    (row,) = bench.gateway.sessions.close("s1").samples("policy")
    assert row.trained == len(sampled) + len(bench.renderer.encode("12 pens")) + 1


async def test_tools_can_be_ruled_out(agent: Agent, bench: Served) -> None:
    bench.script(CALL)
    said = await agent.ask(tools=TOOLS, tool_choice={"type": "none"})
    assert (said.content[0].text, said.stop_reason) == (CALL, "end_turn")


async def test_a_failed_tool_is_told(agent: Agent, bench: Served) -> None:
    bench.script("a", "b")
    for content, shown in (("no such box", "no such box"), ([], "error")):
        result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
        use = {"type": "tool_use", "id": "t", "name": "count", "input": {}}
        await agent.ask(USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]})
        assert f"<tool_response>\n{shown}\n" in bench.renderer.decode(list(bench.engine.requests[-1].tokens))


async def test_a_stop_sequence_is_named(agent: Agent, bench: Served) -> None:
    bench.script("one END two")
    said = await agent.ask(stop_sequences=["never", "END"])
    assert (said.stop_reason, said.stop_sequence, said.content[0].text) == ("stop_sequence", "END", "one ")


async def test_a_cut_answer(agent: Agent, bench: Served) -> None:
    bench.script("abc", finish="length")
    assert (await agent.ask()).stop_reason == "max_tokens"


async def test_an_answer_of_nothing(agent: Agent, bench: Served) -> None:
    bench.script("", "more")
    said = await agent.ask()
    assert (said.content, said.stop_reason) == ([], "end_turn")
    await agent.ask(USER, {"role": "assistant", "content": said.content}, USER)
    first, second = bench.engine.requests
    assert second.tokens[: len(first.tokens) + 1] == [*first.tokens, bench.renderer.end_token]


async def test_thinking_is_shown_and_may_be_left_out_later() -> None:
    async with served(THINKING) as bench:
        agent = Agent(bench)
        bench.script("<think>hm</think>one", "two", "three")
        first = await agent.ask()
        thought, text = first.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "hm", "one")
        assert thought.signature
        whole = {"role": "assistant", "content": first.content}
        short = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text]}
        for answer in (whole, short):
            await agent.ask(USER, answer, USER)
        one, two, three = bench.engine.requests
        sampled = [*bench.renderer.encode("<think>hm</think>one"), bench.renderer.end_token]
        assert two.tokens == three.tokens
        assert two.tokens[: len(one.tokens) + len(sampled)] == one.tokens + sampled
        await agent.client.close()


# ---------------------------------------------------------------- streams


async def test_the_events_of_a_stream(agent: Agent, bench: Served) -> None:
    bench.script(f"I look.\n{CALL}", step=2)
    response = await agent.client.messages.create(**agent.body(tools=TOOLS, stream=True))
    raw = [event async for event in response]
    kinds = [event.type for event in raw]
    texts = kinds.index("content_block_stop") - 2
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * texts,
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    (request,) = bench.engine.requests
    start, delta = raw[0].message, raw[-2]
    assert (start.content, start.stop_reason, start.usage.input_tokens) == ([], None, len(request.tokens))
    assert raw[1].content_block.type == "text"
    assert texts > 1
    used = raw[kinds.index("content_block_stop") + 1].content_block
    assert (used.type, used.name, used.input) == ("tool_use", "count", {})
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("tool_use", len(_sampled(bench)))


def _sampled(bench: Served) -> list[int]:
    (node,) = [node for node in bench.gateway.sessions.get("s1").trees["policy"].nodes() if node.kind == "sampled"]
    return list(node.tokens)


@pytest.mark.parametrize("text", ["plain", f"look {CALL}\n{CALL}", "日本 🙂 é", "a <tool_call>{oops</tool_call> b", ""])
async def test_a_stream_says_what_a_whole_answer_says(agent: Agent, bench: Served, text: str) -> None:
    bench.script(text, step=1)
    bench.script(text, step=1)
    whole = await agent.ask(tools=TOOLS)
    _, streamed = await agent.events(tools=TOOLS)
    assert [_shown(block) for block in streamed.content] == [_shown(block) for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def _shown(block: Any) -> Any:
    return block.text if block.type == "text" else (block.name, block.input)


async def test_thinking_streams_with_its_signature() -> None:
    async with served(THINKING) as bench:
        agent = Agent(bench)
        bench.script("<think>so it is</think>one", step=1)
        seen, message = await agent.events()
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == ("so it is", "one")
        kinds = [event.type for event in seen]
        assert kinds.index("signature") > max(place for place, kind in enumerate(kinds) if kind == "thinking")
        assert message.content[0].signature
        await agent.client.close()


async def test_a_stop_sequence_in_a_stream(agent: Agent, bench: Served) -> None:
    bench.script("one END two", step=1)
    _, message = await agent.events(stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "END", "one ")


async def test_an_error_in_a_stream_travels_in_it(agent: Agent, bench: Served) -> None:
    import anthropic

    bench.engine.scripts.append([chunk(bench.renderer.encode("ab")), RuntimeError("broken")])
    with pytest.raises(anthropic.APIStatusError, match="broken"):
        await agent.events()
    assert bench.gateway.sessions.close("s1").samples("policy") == []


# ---------------------------------------------------------------- counting and models


async def test_counting_is_what_a_call_is_given_and_leaves_no_trace(agent: Agent, bench: Served) -> None:
    bench.script(f"I look.\n{CALL}", "x")
    asked: Any = {"model": "policy", "system": "be brief", "tools": TOOLS}
    history = [USER]
    counted = [(await agent.client.messages.count_tokens(messages=history, **asked)).input_tokens]
    assert bench.gateway.sessions.get("s1").trees == {}
    first = await agent.ask(*history, system="be brief", tools=TOOLS)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "12"}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    before = list(bench.gateway.sessions.get("s1").trees["policy"].nodes())
    counted.append((await agent.client.messages.count_tokens(messages=history, **asked)).input_tokens)
    assert list(bench.gateway.sessions.get("s1").trees["policy"].nodes()) == before
    await agent.ask(*history, system="be brief", tools=TOOLS)
    assert counted == [len(request.tokens) for request in bench.engine.requests]
    assert bench.gateway.sessions.get("s1").calls == 2


async def test_models_in_both_shapes(agent: Agent, bench: Served) -> None:
    import anthropic

    page = await agent.client.models.list()
    assert [(model.type, model.id, model.display_name) for model in page.data] == [("model", "policy", "policy")]
    assert (page.has_more, page.first_id, page.last_id) == (False, "policy", "policy")
    one = await agent.client.models.retrieve("policy")
    assert one.created_at.year > 2000
    async with AsyncOpenAI(base_url=f"{bench.url}/v1", api_key=bench.key, max_retries=0) as client:
        assert (await client.models.retrieve("policy")).object == "model"
    with pytest.raises(anthropic.NotFoundError, match="policy"):
        await agent.client.models.retrieve("claude")


async def test_the_key_alone_finds_its_session(bench: Served) -> None:
    import anthropic

    bench.script("hi")
    async with anthropic.AsyncAnthropic(
        base_url=bench.url, auth_token=bench.key, api_key=None, max_retries=0
    ) as client:
        said = await client.messages.create(model="policy", max_tokens=5, messages=[USER])
    assert said.content[0].text == "hi"  # type: ignore[union-attr]


# ---------------------------------------------------------------- refusals

IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    (
        {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]},
        "messages: the last message is the assistant's",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "", "name": "a", "input": {}}]}]},
        "content[0]",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": ""}]}, USER]},
        "content[0]",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 21}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"stop_sequences": ["a"] * 3}, "stop_sequences: at most 2"),
    ({"tools": [{"name": "a", "input_schema": {}}] * 3}, "tools: at most 2"),
    ({"messages": [USER] * 4}, "messages: at most 3"),
]
LIMITS = GatewayConfig(messages=3, tools=2, stops=2)


async def test_wrong_fields_are_named() -> None:
    async with served(limits=LIMITS) as bench:
        for change, named in WRONG:
            body = {"model": "policy", "max_tokens": 5, "messages": [USER]} | change
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                status, answer, _ = await bench.call("POST", path, json=body)
                if path.endswith("count_tokens") and status == 200:
                    continue  # a field that only a call has
                assert status == 400, change
                assert answer["type"] == "error"
                assert answer["error"]["type"] == "invalid_request_error"
                assert named in answer["error"]["message"]
        assert bench.engine.requests == []


async def test_max_tokens_is_required(bench: Served) -> None:
    status, answer, _ = await bench.call("POST", "/v1/messages", json={"model": "policy", "messages": [USER]})
    assert status == 400
    assert "max_tokens" in answer["error"]["message"]


async def test_errors_have_the_providers_shape(agent: Agent, bench: Served) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as overflow:
        await agent.ask({"role": "user", "content": "x" * 5000})
    assert overflow.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    bench.engine.scripts += [[ContextOverflow("too long")], [QueueFull("full")], [RuntimeError("broken")]]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        await agent.ask()
    with pytest.raises(anthropic.RateLimitError) as full:
        await agent.ask()
    assert full.value.response.headers["retry-after"] == "1"
    with pytest.raises(anthropic.InternalServerError, match="broken"):
        await agent.ask()
    bench.engine.scripts.append([chunk([1, 2], finish="abort")])
    with pytest.raises(anthropic.APIStatusError) as gone:
        await agent.ask()
    assert (gone.value.status_code, gone.value.body["error"]["type"]) == (503, "overloaded_error")  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await agent.client.messages.create(model="claude", max_tokens=1, messages=[USER])
    bench.gateway.sessions.close("s1")
    with pytest.raises(anthropic.NotFoundError, match="not open"):
        await agent.ask()


async def test_keys(bench: Served) -> None:
    other = bench.gateway.sessions.open("s2", seed=1, group="g1", deadline_seconds=60)
    body = {"model": "policy", "max_tokens": 1, "messages": [USER]}
    for path in ("/s/s1/v1/messages", "/s/s1/v1/messages/count_tokens"):
        for key in ("", "wrong", other):
            status, answer, _ = await bench.call("POST", path, key=key, json=body)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, answer, _ = await bench.call(
        "GET", "/s/s1/v1/models", key="wrong", headers={"anthropic-version": "2023-06-01"}
    )
    assert (status, answer["type"]) == (401, "error")
    bench.script("a")
    assert (await bench.call("POST", "/s/s1/v1/messages", key="", headers={"x-api-key": TOKEN}, json=body))[0] == 200


async def test_calls_at_work_in_the_whole_gateway_are_bounded() -> None:
    async with served(limits=GatewayConfig(total=2)) as bench:
        agent = Agent(bench)
        other = bench.gateway.sessions.open("s2", seed=1, group="g1", deadline_seconds=60)
        bench.engine.scripts += [[None, *[chunk([1], finish="stop")]] for _ in range(2)]
        held = [asyncio.create_task(agent.ask()), asyncio.create_task(agent.events())]
        await until(lambda: len(bench.engine.requests) == 2)
        body = {"model": "policy", "max_tokens": 1, "messages": [USER]}
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"):
            status, _, headers = await bench.call("POST", path, key=other, json=body)
            assert (status, headers["retry-after"]) == (429, "1")
        assert (await bench.call("GET", "/v1/models", key=other))[0] == 200
        bench.engine.gate.set()
        await asyncio.gather(*held)
        bench.script("a")
        assert (await bench.call("POST", "/v1/messages", key=other, json=body))[0] == 200
        await agent.client.close()

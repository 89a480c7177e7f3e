"""Responses with the real OpenAI client: items, continuations, and the events that its accumulators need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_support import CHATML, QWEN_LIKE, chunk
from openai_support import CHAT_TOOLS, HERMES_CALL, STYLES, USER, asking

from rillflow.config import GatewayConfig
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.gateway.trees.matching import following
from rillflow.gateway.trees.messages import message

TOOLS: list[Any] = [{"type": "function", "name": "count", "parameters": {"type": "object"}}]
THOUGHT = "<think>\nhm, boxes\n</think>\n\n"


async def helped(asked: Any, input: Any = "hello", **arguments: Any) -> tuple[Any, list[Any]]:
    """The final response as the client's stream helper accumulates it, and the events."""
    async with asked.client.responses.stream(model="policy", input=input, **arguments) as stream:
        events = [event async for event in stream]
        return await stream.get_final_response(), events


def shape(response: Any) -> list[Any]:
    """The items of a response without their ids."""
    made: list[Any] = []
    for item in response.output:
        if item.type == "message":
            made.append(("message", item.content[0].text))
        elif item.type == "reasoning":
            made.append(("reasoning", item.content[0].text))
        else:
            made.append((item.type, item.name, item.arguments))
    return made


CALLED = ("function_call", "count", '{"box": "red"}')


# ---------------------------------------------------------------- answers


async def test_an_answer() -> None:
    async with asking() as asked:
        asked.script("abc hello")
        response = await asked.respond(metadata={"a": "b"}, temperature=0, max_output_tokens=9, store=False, user="u")
        assert (response.output_text, response.status, response.object) == ("abc hello", "completed", "response")
        assert (response.metadata, response.store, response.max_output_tokens) == ({"a": "b"}, False, 9)
        (request,) = asked.served.engine.requests
        assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0)
        assert response.usage.input_tokens == len(request.tokens)
        assert response.usage.output_tokens == response.usage.total_tokens - response.usage.input_tokens
        assert response.id.startswith("resp_")


async def test_the_prompt_is_the_one_of_chat_completions() -> None:
    async with asking() as asked:
        asked.script("a", "b")
        await asked.respond(
            [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            ],
            tools=[{"type": "web_search"}, *TOOLS],
        )
        await asked.chat({"role": "system", "content": "be brief"}, USER, tools=CHAT_TOOLS)
        one, two = asked.served.engine.requests
        assert one.tokens == two.tokens
        assert one.sampling.seed != two.sampling.seed


@pytest.mark.parametrize("style", STYLES)
async def test_calls_whole_and_streamed(style: str) -> None:
    text = STYLES[style] if style == "json" else f"{THOUGHT}{STYLES[style]}"
    async with asking(QWEN_LIKE, tools=style) as asked:
        asked.script(text, text, step=1)
        whole = await asked.respond(tools=TOOLS)
        final, _ = await helped(asked, tools=TOOLS)
    expected = [CALLED] if style == "json" else [("reasoning", "hm, boxes"), CALLED]
    assert shape(whole) == shape(final) == expected


async def test_a_cut_answer_is_incomplete() -> None:
    async with asking() as asked:
        asked.script("abc", "abc", "", finish="length")
        whole = await asked.respond(max_output_tokens=1)
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert whole.output[0].status == "incomplete"
        events = [event async for event in await asked.respond(stream=True)]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output[0].status == "incomplete"
        empty = [event async for event in await asked.respond(stream=True)]
        assert [item.content[0].text for item in empty[-1].response.output] == [""]


async def test_logprobs() -> None:
    async with asking() as asked:
        asked.script("abc hello", "abc hello")
        include: Any = ["message.output_text.logprobs"]
        whole = await asked.respond(include=include)
        final, events = await helped(asked, include=include)
        for response in (whole, final):
            entries = response.output[0].content[0].logprobs
            assert [entry.token for entry in entries] == ["abc", " ", "hello"]
        deltas = [
            entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
        ]
        assert deltas == ["abc", " ", "hello"]


# ---------------------------------------------------------------- streams


async def test_the_events_of_a_stream() -> None:
    async with asking(QWEN_LIKE) as asked:
        asked.script(f"{THOUGHT}I look.\n{HERMES_CALL}\nand more", step=2)
        final, events = await helped(asked, tools=TOOLS)
    kinds: list[str] = []
    for event in events:
        if not kinds or kinds[-1] != event.type or not event.type.endswith("delta"):
            kinds.append(event.type)
    message = [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds == [
        "response.created",
        "response.in_progress",
        *[kind.replace("output_text", "reasoning_text") for kind in message],
        *message,
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        *message,
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert shape(final) == [("reasoning", "hm, boxes"), ("message", "I look.\n"), CALLED, ("message", "\nand more")]
    assert len({item.id for item in final.output}) == 4
    assert final.usage.output_tokens > 0


async def test_an_engine_that_breaks_ends_in_a_failed_response() -> None:
    async with asking() as asked:
        ids = asked.served.renderer.encode("ab")
        asked.served.engine.scripts.append([chunk(ids), RuntimeError("broken")])
        events = [event async for event in await asked.respond(stream=True)]
        assert events[-1].type == "response.failed"
        assert "broken" in events[-1].response.error.message
        assert asked.served.gateway.sessions.get("s1").at_work == {}
        asked.served.engine.scripts.append([RuntimeError("broken")])
        with pytest.raises(openai.InternalServerError, match="broken"):
            await asked.respond(stream=True)
        assert asked.served.gateway.sessions.close("s1").samples("policy") == []


async def test_a_stream_that_is_cut_from_outside_says_so() -> None:
    async with asking() as asked:
        ids = asked.served.renderer.encode("ab")
        asked.served.engine.scripts.append([chunk(ids), None])

        async def read() -> None:
            async for event in await asked.respond(stream=True):
                if event.type == "response.output_text.delta":
                    asked.served.gateway.sessions.close("s1")

        with pytest.raises(openai.APIError) as cut:
            await read()
        assert cut.value.code == "session_not_found"


# ---------------------------------------------------------------- histories


def replayed(response: Any, *, keep_ids: bool) -> list[Any]:
    items = [item.model_dump(exclude_none=True) for item in response.output]
    if not keep_ids:
        items = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
    return items


@pytest.mark.parametrize("keep_ids", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_replayed_items_continue_the_answer(keep_ids: bool, stream: bool) -> None:
    text = f"{THOUGHT}I look.\n{HERMES_CALL}"
    async with asking(CHATML, reasoning="think") as asked:
        asked.script(text, "12 pens")
        input: list[Any] = [{"role": "user", "content": "hello"}]
        given: dict[str, Any] = {"tools": TOOLS, "instructions": "be brief"}
        first = (await helped(asked, input, **given))[0] if stream else await asked.respond(input, **given)
        assert shape(first) == [("reasoning", "hm, boxes"), ("message", "I look.\n"), CALLED]
        input += replayed(first, keep_ids=keep_ids)
        input.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12"})
        second = await asked.respond(input, **given)
        assert second.output_text == "12 pens"
        (row,) = asked.served.gateway.sessions.close("s1").samples("policy")
        one, two = asked.served.engine.requests
        sampled = [*asked.served.renderer.encode(text), asked.served.renderer.end_token]
        assert two.tokens[: len(one.tokens) + len(sampled)] == one.tokens + sampled
        assert (row.fork, row.trained) == ("", len(sampled) + len(asked.served.renderer.encode("12 pens")) + 1)


async def test_text_around_a_call_is_one_answer_again() -> None:
    async with asking() as asked:
        asked.script(f"I look.{HERMES_CALL}and more", "next", "next")
        first, _ = await helped(asked, tools=TOOLS)
        output = {
            "type": "function_call_output",
            "call_id": first.output[1].call_id,
            "output": [{"type": "input_text", "text": "12"}],
        }
        await asked.respond([USER, *replayed(first, keep_ids=True), output], tools=TOOLS)
        (row,) = asked.served.gateway.sessions.close("s1").samples("policy")
        assert row.fork == ""


async def test_two_answers_in_a_row_stay_two() -> None:
    async with asking() as asked:
        asked.script("one", "two", "three")
        history: list[Any] = [USER]
        for _ in range(3):
            history += replayed(await asked.respond(history), keep_ids=True)
        (row,) = asked.served.gateway.sessions.close("s1").samples("policy")
        assert row.trained == sum(len(asked.served.renderer.encode(text)) + 1 for text in ("one", "two", "three"))


async def test_a_previous_response_is_continued() -> None:
    async with asking() as asked:
        asked.script(f"look {HERMES_CALL}", "12 pens", "again")
        first = await asked.respond("hello", tools=TOOLS, instructions="be brief")
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12"}
        second = await asked.respond([output], previous_response_id=first.id, tools=TOOLS, instructions="be brief")
        assert second.previous_response_id == first.id
        one, two = asked.served.engine.requests
        assert two.tokens[: len(one.tokens)] == one.tokens
        assert asked.prompts[1].count("be brief") == 1
        await asked.respond("and now?", previous_response_id=second.id, tools=TOOLS, instructions="be long")
        assert "be brief" not in asked.prompts[2]
        assert "12 pens" in asked.prompts[2]
        rows = asked.served.gateway.sessions.close("s1").samples("policy")
        assert [row.fork for row in rows] == ["", "history"]


async def test_a_previous_response_is_known_after_a_restart(tmp_path: Path) -> None:
    log = FileSessionLog(tmp_path)
    async with asking(log=log) as asked:
        asked.script("one")
        first = await asked.respond("hello", instructions="be brief")
    await log.close()
    log = FileSessionLog(tmp_path)
    try:
        (session,) = log.restore()
        told = [message("user", "and?")]
        history = following(session.trees, first.id.removeprefix("resp_"), told)
        assert [said.body for said in history] == [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "and?"},
        ]
    finally:
        await log.close()


async def test_what_followed_a_raw_prompt_is_no_previous_response() -> None:
    async with asking() as asked:
        asked.script("one", "two")
        completed = await asked.complete("hello")
        with pytest.raises(openai.NotFoundError, match="no response with the id"):
            await asked.respond("more", previous_response_id=f"resp_{completed.id.removeprefix('cmpl-')}")


async def test_an_unknown_previous_response() -> None:
    async with asking() as asked:
        asked.served.gateway.sessions.open("s2", seed=1, group="g", deadline_seconds=60)
        for id in ("resp_unknown", "nonsense", "resp_"):
            with pytest.raises(openai.NotFoundError) as caught:
                await asked.respond(previous_response_id=id)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert asked.served.engine.requests == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [USER] * 4}, "input"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": TOOLS * 3}, "tools"),
    ({"max_output_tokens": 101}, "max_output_tokens"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"top_logprobs": 3}, "top_logprobs"),
]


async def test_what_is_refused_is_named() -> None:
    async with asking(limits=GatewayConfig(messages=3, tools=2, tokens=100)) as asked:
        for change, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await asked.respond(extra_body=change)
            assert caught.value.param == param, change
        with pytest.raises(openai.BadRequestError) as caught:
            await asked.respond("x" * 5000)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        asked.script("a")
        await asked.respond(text={"format": {"type": "text"}, "verbosity": "low"}, reasoning={"effort": "low"})


# ---------------------------------------------------------------- kept answers


@pytest.mark.parametrize("text", ["abc hello", HERMES_CALL, f"{THOUGHT}abc"])
async def test_a_response_can_be_retrieved(text: str) -> None:
    async with asking(QWEN_LIKE) as asked:
        asked.script(text)
        given = await asked.respond(tools=TOOLS)
        kept = await asked.client.responses.retrieve(given.id)
        assert [item.model_dump() for item in kept.output] == [item.model_dump() for item in given.output]
        assert (kept.id, kept.model, kept.status, kept.usage) == (given.id, given.model, given.status, given.usage)


async def test_a_response_of_nobody_cannot_be_retrieved() -> None:
    async with asking() as asked:
        with pytest.raises(openai.NotFoundError) as refused:
            await asked.client.responses.retrieve("resp_none")
        assert (refused.value.code, refused.value.param) == ("response_not_found", "response_id")


async def test_the_tokens_of_an_input_are_those_of_the_call() -> None:
    async with asking() as asked:
        asked.script("a", "b")
        count = asked.client.responses.input_tokens.count
        first: Any = {"input": "hello", "instructions": "be brief", "tools": TOOLS}
        counted = await count(model="policy", **first)
        given = await asked.respond(**first)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", given.usage.input_tokens)
        more: Any = {"input": "go on", "previous_response_id": given.id, "tools": TOOLS}
        counted = await count(model="policy", **more)
        assert counted.input_tokens == (await asked.respond(**more)).usage.input_tokens
        with pytest.raises(openai.NotFoundError, match="no response with the id"):
            await count(model="policy", input="go on", previous_response_id="resp_none")

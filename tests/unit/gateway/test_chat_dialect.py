"""Chat completions with the real OpenAI client: tool styles, reasoning, the stream helper, refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai
import pytest
from gateway_support import CHATML, DEEPSEEK_LIKE, QWEN_LIKE
from openai_support import CHAT_TOOLS, HERMES_CALL, STYLES, USER, asking

from rillflow.config import GatewayConfig

THOUGHT = "<think>\nhm, boxes\n</think>\n\n"


async def helped(asked: Any, *messages: Any, **arguments: Any) -> tuple[Any, list[Any]]:
    """Return the answer that the client's stream helper builds, and its events."""
    async with asked.client.chat.completions.stream(
        model="policy", messages=list(messages) or [USER], **arguments
    ) as stream:
        events = [event async for event in stream]
        return await stream.get_final_completion(), events


@pytest.mark.parametrize("style", STYLES)
async def test_every_style_of_calls_whole_and_streamed(style: str) -> None:
    text = STYLES[style] if style == "json" else f"{THOUGHT}{STYLES[style]}"
    async with asking(QWEN_LIKE, tools=style) as asked:
        asked.script(text, text, step=1)
        whole = (await asked.chat(tools=CHAT_TOOLS)).choices[0]
        final, events = await helped(asked, tools=CHAT_TOOLS)
    streamed = final.choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("count", '{"box": "red"}')
    assert [event.type for event in events].count("tool_calls.function.arguments.done") == 1
    assert whole.message.content is None
    assert whole.message.tool_calls[0].id != streamed.message.tool_calls[0].id


async def test_several_calls_keep_their_numbers_in_a_stream() -> None:
    async with asking() as asked:
        asked.script(f"look {HERMES_CALL} and {HERMES_CALL}\n", step=1)
        final, _ = await helped(asked, tools=CHAT_TOOLS)
    said = final.choices[0].message
    assert said.content == "look  and "
    assert [call.function.arguments for call in said.tool_calls] == ['{"box": "red"}'] * 2
    assert len({call.id for call in said.tool_calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_shown_apart(stream: bool) -> None:
    async with asking(QWEN_LIKE) as asked:
        asked.script(f"{THOUGHT}12 pens")
        if stream:
            final, _ = await helped(asked)
            said = final.choices[0].message
        else:
            said = (await asked.chat()).choices[0].message
    assert (said.content, said.reasoning_content) == ("12 pens", "hm, boxes")


async def test_a_prompt_that_opens_the_reasoning() -> None:
    async with asking(DEEPSEEK_LIKE) as asked:
        asked.script("hm, boxes\n</think>\n\n12 pens", "cut in the middle", finish="stop")
        said = (await asked.chat()).choices[0].message
        assert (said.content, said.reasoning_content) == ("12 pens", "hm, boxes")
        said = (await asked.chat()).choices[0].message
        assert (said.content, said.reasoning_content) == ("", "cut in the middle")
        assert asked.prompts[0].endswith("<think>\n")


async def test_reasoning_can_be_switched() -> None:
    async with asking(QWEN_LIKE, reasoning="none") as asked:
        asked.script(f"{THOUGHT}12 pens")
        assert (await asked.chat()).choices[0].message.content == f"{THOUGHT}12 pens"
    async with asking(CHATML, reasoning="think") as asked:
        asked.script(f"{THOUGHT}12 pens")
        assert (await asked.chat()).choices[0].message.content == "12 pens"


async def test_an_answer_is_continued_whether_its_reasoning_is_replayed_or_not() -> None:
    async with asking(CHATML, reasoning="think") as asked:
        asked.script(f"{THOUGHT}12 pens", "more", "more")
        said = (await asked.chat()).choices[0].message
        for replayed in ({"content": said.content}, {"content": said.content, "reasoning_content": "hm, boxes"}):
            await asked.chat(USER, {"role": "assistant", **replayed}, USER)
        first, second, third = asked.served.engine.requests
        assert second.tokens == third.tokens
        assert second.tokens[: len(first.tokens)] == first.tokens
        assert THOUGHT in asked.prompts[1]
        record = asked.served.gateway.sessions.close("s1")
        assert [row.fork for row in record.samples("policy")] == ["", ""]


# Writes the name of a message, if it has one.
NAMING = CHATML.replace("'<|im_start|>' ~ m.role ~", "'<|im_start|>' ~ m.role ~ (' ' ~ m.name if m.name else '') ~")


@pytest.mark.parametrize(
    ("template", "before", "change"),
    [
        (CHATML, "look ", {"name": "helper"}),
        (NAMING, "look ", {"name": "helper"}),
        (QWEN_LIKE, f"{THOUGHT}look ", {"name": "helper"}),
        (CHATML, "\n", {"content": None}),
        (CHATML, " ", {"content": ""}),
        (NAMING, "\n\n", {"name": "helper", "content": None}),
    ],
)
async def test_answers_are_found_again_by_agents_that_name_them_or_drop_blank_text(
    template: str, before: str, change: dict[str, Any]
) -> None:
    async with asking(template) as asked:
        history: list[Any] = [USER]
        for _ in range(4):
            asked.script(before + HERMES_CALL)
            said = (await asked.chat(*history, tools=CHAT_TOOLS)).choices[0].message
            result = {"role": "tool", "content": "12", "tool_call_id": said.tool_calls[0].id}
            history += [said.model_dump(exclude_none=True) | change, result]
        (row,) = asked.served.gateway.sessions.close("s1").samples("policy")
        sampled = [*asked.served.renderer.encode(before + HERMES_CALL), asked.served.renderer.end_token]
        assert (row.fork, row.trained) == ("", 4 * len(sampled))
        for one, after in pairwise(asked.served.engine.requests):
            assert after.tokens[: len(one.tokens) + len(sampled)] == one.tokens + sampled
        assert "helper" not in "".join(asked.prompts)


async def test_what_tool_choice_means() -> None:
    async with asking() as asked:
        asked.script(*[HERMES_CALL] * 4)
        named = {"type": "function", "function": {"name": "count"}}
        for choice in ("auto", "required", named):
            assert (await asked.chat(tools=CHAT_TOOLS, tool_choice=choice)).choices[0].message.tool_calls
        said = (await asked.chat(tools=CHAT_TOOLS, tool_choice="none", parallel_tool_calls=False)).choices[0].message
        assert (said.content, said.tool_calls) == (HERMES_CALL, None)
        assert len({tuple(request.tokens) for request in asked.served.engine.requests}) == 1


async def test_a_call_that_breaks_off_is_text_in_a_stream_too() -> None:
    async with asking() as asked:
        asked.script(HERMES_CALL[:40], finish="length", step=1)
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            await helped(asked, tools=CHAT_TOOLS)
    said = caught.value.completion.choices[0].message
    assert (said.content, said.tool_calls) == (HERMES_CALL[:40], None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"max_completion_tokens": 300, "n": 2}, "max_completion_tokens"),
]


async def test_what_is_refused_is_named() -> None:
    async with asking(limits=GatewayConfig(tokens=500)) as asked:
        for change, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await asked.chat(extra_body=change)
            assert (caught.value.param, caught.value.type) == (param, "invalid_request_error"), change
        asked.script("a", "b")
        await asked.chat(response_format={"type": "text"}, n=2, max_tokens=250)


async def test_a_refusal_is_replayed_as_what_was_said() -> None:
    async with asking() as asked:
        asked.script("a")
        await asked.chat(USER, {"role": "assistant", "content": None, "refusal": "I will not"}, USER)
        assert "I will not" in asked.prompts[0]

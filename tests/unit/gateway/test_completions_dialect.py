"""Completions with the real OpenAI client: raw prompts, text or ids, continued as they are."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai_support import HERMES_CALL, asking

from rillflow.config import GatewayConfig


async def collected(stream: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    usage = None
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, usage


async def test_a_prompt_is_continued_as_it_is() -> None:
    async with asking() as asked:
        asked.script("abc hello")
        response = await asked.complete("once upon", max_tokens=20, seed=3, temperature=0)
        assert response.id.startswith("cmpl-")
        assert response.object == "text_completion"
        assert (response.choices[0].text, response.choices[0].finish_reason) == ("abc hello", "stop")
        (request,) = asked.served.engine.requests
        assert asked.prompts == ["once upon"]
        assert (request.sampling.max_tokens, request.sampling.temperature) == (20, 0)
        assert response.usage.prompt_tokens == len(request.tokens)
        assert response.usage.completion_tokens == response.usage.total_tokens - len(request.tokens)


@pytest.mark.parametrize("listed", [False, True])
async def test_ids_are_given_as_they_are(listed: bool) -> None:
    ids = [70, 71, 258, 1]
    async with asking() as asked:
        asked.script("ok")
        await asked.complete([ids] if listed else ids)
        assert asked.served.engine.requests[0].tokens == ids


async def test_what_was_sampled_keeps_its_ids() -> None:
    async with asking() as asked:
        asked.script("ab", "more", finish="length", step=1)
        odd = asked.served.engine.scripts[0]
        assert len(odd) == 1
        first = await asked.complete("x")
        await asked.complete("x" + first.choices[0].text + "c")
        one, two = asked.served.engine.requests
        sampled = asked.served.renderer.encode("ab")
        assert two.tokens[: len(one.tokens) + len(sampled)] == one.tokens + sampled  # "abc" would be one token
        assert two.tokens[len(one.tokens) + len(sampled) :] == asked.served.renderer.encode("c")
        (row,) = asked.served.gateway.sessions.close("s1").samples("policy")
        assert row.trained == len(sampled) + len(asked.served.renderer.encode("more"))


async def test_calls_and_reasoning_are_plain_text_here() -> None:
    text = f"<think>hm</think>{HERMES_CALL}"
    async with asking(reasoning="think") as asked:
        asked.script(text)
        assert (await asked.complete("x")).choices[0].text == text


async def test_echo_choices_and_stop() -> None:
    async with asking() as asked:
        asked.script("one END two", "two")
        response = await asked.complete(["once "], n=2, best_of=2, echo=True, stop="END")
        assert {choice.text for choice in response.choices} == {"once one ", "once two"}
        asked.script("one")
        response = await asked.complete(asked.served.renderer.encode("once "), echo=True)
        assert response.choices[0].text == "once one"


async def test_logprobs_in_the_old_shape() -> None:
    async with asking() as asked:
        asked.script("abc hello", "abc hello")
        whole = (await asked.complete("x", logprobs=1)).choices[0].logprobs
        assert whole.tokens == ["abc", " ", "hello"]
        assert whole.text_offset == [0, 3, 4]
        assert whole.token_logprobs == [-0.25, -0.5, -0.75]
        assert whole.top_logprobs is None
        parts = [
            choice.logprobs
            async for event in await asked.complete("x", logprobs=0, stream=True)
            for choice in event.choices
            if choice.logprobs
        ]
        assert [token for part in parts for token in part.tokens] == whole.tokens
        assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


async def test_streams() -> None:
    async with asking() as asked:
        asked.script("one END", "two", step=1)
        texts, finishes, usage = await collected(
            await asked.complete(
                "p: ", n=2, echo=True, stop=["END"], stream=True, stream_options={"include_usage": True}
            )
        )
        assert set(texts.values()) == {"p: one ", "p: two"}
        assert set(finishes.values()) == {"stop"}
        assert usage.completion_tokens == sum(len(node) for node in sampled(asked))


def sampled(asked: Any) -> list[Any]:
    record = asked.served.gateway.sessions.close("s1")
    return [node.tokens for node in record.trees["policy"].nodes() if node.kind == "sampled"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"logprobs": 9}, "logprobs"),
    ({"n": 3}, "n"),
    ({"stop": ["a", "b", "c"]}, "stop"),
    ({"max_tokens": 101}, "max_tokens"),
]


async def test_what_is_refused_is_named() -> None:
    async with asking(limits=GatewayConfig(choices=2, stops=2, tokens=100)) as asked:
        for change, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await asked.complete("x", extra_body=change)
            assert caught.value.param == param, change
        with pytest.raises(openai.BadRequestError) as caught:
            await asked.complete("x" * 5000)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        assert asked.served.engine.requests == []

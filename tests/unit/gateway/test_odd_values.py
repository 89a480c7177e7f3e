"""Values that are right but odd: numbers that no engine or log can hold, prompts that fit nowhere, agents that go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from gateway_support import QWEN_LIKE, chunk, make_renderer
from openai_support import CHAT_TOOLS, USER, asking
from serving import TOKEN, served, until

from rillflow.config import GatewayConfig
from rillflow.gateway import Renderer
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.types import Chunk, GenerateRequest

BIG = 123456789012345678901234567890


@pytest.mark.parametrize(("top_k", "top_p"), [(10**26, 1.0), (0, 1e-300), (1 << 63, 1e-46)])
async def test_cuts_that_an_engine_cannot_hold(top_k: int, top_p: float) -> None:
    async with asking() as asked:
        asked.script("fine")
        await asked.chat(USER, top_p=top_p, extra_body={"top_k": top_k})
        (request,) = asked.served.engine.requests
        assert 0 <= request.sampling.top_k < 1 << 31
        assert 0 < np.float32(request.sampling.top_p) <= 1


async def test_a_top_k_that_is_off_and_the_smallest_top_p() -> None:
    async with asking() as asked:
        for ask in (asked.chat, lambda **send: asked.complete("hello", **send), asked.respond):
            asked.script("fine")
            await ask(top_p=0, extra_body={"top_k": -1})
            sampling = asked.served.engine.requests[-1].sampling
            assert sampling.top_k == 0
            assert 0 < sampling.top_p <= 1e-6


@pytest.mark.parametrize(("stop", "said"), [("", "one END"), ([""], "one END"), (["", "END"], "one ")])
async def test_empty_stop_strings_are_as_if_not_given(stop: Any, said: str) -> None:
    async with asking() as asked:
        asked.script("one END", "one END")
        assert (await asked.chat(stop=stop)).choices[0].message.content == said
        assert (await asked.complete("hello", stop=stop)).choices[0].text == said


async def test_a_functions_message_is_a_tools() -> None:
    async with asking() as asked:
        asked.script("fine", "fine")
        for role in ("function", "tool"):
            await asked.chat(USER, {"role": role, "name": "count", "content": "12"})
        one, other = asked.prompts
        assert one == other
        assert "<tool_response>\n12" in one


async def test_a_model_can_be_asked_for_by_an_alias() -> None:
    async with asking(limits=GatewayConfig(aliases={"gpt-4o": "policy"})) as asked:
        asked.script("one", "two", "three", "four")
        client = asked.client
        assert [model.id async for model in client.models.list()] == ["policy", "gpt-4o"]
        assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"
        first = await client.chat.completions.create(model="gpt-4o", messages=[USER])
        assert first.model == "gpt-4o"
        said = {"role": "assistant", "content": "one"}
        assert (await asked.chat(USER, said, USER)).model == "policy"
        assert (await client.responses.create(model="gpt-4o", input="hi")).model == "gpt-4o"
        stream = await client.completions.create(model="gpt-4o", prompt="hi", stream=True)
        assert {part.model async for part in stream} == {"gpt-4o"}
        body = {"model": "gpt-4o", "messages": [USER]}
        status, counted, _ = await asked.served.call("POST", "/v1/messages/count_tokens", json=body)
        assert (status, counted["input_tokens"]) == (200, first.usage.prompt_tokens)
        with pytest.raises(openai.NotFoundError, match="known models: policy, gpt-4o"):
            await client.chat.completions.create(model="gpt-5", messages=[USER])
        record = asked.served.gateway.sessions.close("s1")
        assert list(record.trees) == ["policy"]
        assert len(record.samples("policy")) == 3


@pytest.mark.parametrize("scheme", ["bearer", "BEARER ", "bEARER"])
async def test_the_scheme_of_a_key_may_have_any_case(scheme: str) -> None:
    async with served() as gateway:
        for key in (gateway.key, TOKEN):
            path = "/v1/models" if key == gateway.key else "/health"
            status, _, _ = await gateway.call("GET", path, key="", headers={"authorization": f"{scheme} {key}"})
            assert status == 200


DISTORTIONS: list[tuple[str, Any, Any]] = [
    ("frequency_penalty", 0.5, 0.0),
    ("presence_penalty", -1, 0),
    ("repetition_penalty", 0, 1.0),
    ("logit_bias", {"5": -100}, {}),
    ("min_p", 0.1, 0),
    ("typical_p", 0.9, 1),
    ("top_a", 0.2, 0.0),
    ("min_tokens", 4, 0),
    ("ignore_eos", True, False),
    ("bad_words", ["no"], []),
    ("allowed_token_ids", [1], []),
    ("use_beam_search", True, False),
]


@pytest.mark.parametrize(("name", "changing", "neutral"), DISTORTIONS)
async def test_what_would_change_the_distribution_is_refused_by_name(name: str, changing: Any, neutral: Any) -> None:
    async with asking() as asked:
        for ask in (asked.chat, lambda **send: asked.complete("hello", **send), asked.respond):
            with pytest.raises(openai.BadRequestError, match="not supported") as refused:
                await ask(extra_body={name: changing})
            assert refused.value.param == name
            asked.script("fine", "fine")
            await ask(extra_body={name: neutral})
            await ask(extra_body={name: None})


async def test_a_temperature_that_an_engine_would_round_is_refused_by_name() -> None:
    async with asking() as asked:
        for ask in (asked.chat, lambda **send: asked.complete("hello", **send), asked.respond):
            with pytest.raises(openai.BadRequestError, match=r"send 0 or at least 0\.01") as refused:
                await ask(temperature=0.005)
            assert refused.value.param == "temperature"
            asked.script("fine")
            await ask(temperature=0.01)


async def test_a_call_with_a_number_that_the_log_cannot_hold(tmp_path: Path) -> None:
    said = json.dumps({"name": "count", "arguments": {"box": [{"size": BIG}, 1e300]}})
    log = FileSessionLog(tmp_path)
    async with asking(log=log) as asked:
        asked.script(f"<tool_call>\n{said}\n</tool_call>", "done")
        answer: Any = (await asked.chat(USER, tools=CHAT_TOOLS)).choices[0].message
        (call,) = answer.tool_calls
        assert json.loads(call.function.arguments) == {"box": [{"size": BIG}, 1e300]}
        result = {"role": "tool", "content": "12", "tool_call_id": call.id}
        await asked.chat(USER, answer.model_dump(exclude_none=True), result, tools=CHAT_TOOLS)
    await log.close()
    log = FileSessionLog(tmp_path)
    try:
        (session,) = log.restore()
        (row,) = session.record().samples("policy")
        assert row.fork == ""
    finally:
        await log.close()


async def test_prompts_that_fit_nowhere_count_as_held(tmp_path: Path) -> None:
    log = FileSessionLog(tmp_path)
    async with asking(log=log) as asked:
        session = asked.served.gateway.sessions.get("s1")
        with pytest.raises(openai.BadRequestError, match="context"):
            await asked.chat({"role": "user", "content": "x" * 10_000})
        assert session.held >= 10_000
        held = session.held
        with pytest.raises(openai.BadRequestError, match="context"):
            await asked.chat({"role": "user", "content": "x" * 10_000})
        assert session.held == held
        asked.script("fine")
        await asked.chat(USER)
    await log.close()
    log = FileSessionLog(tmp_path)
    try:
        (restored,) = log.restore()
        assert not restored.incomplete
        (row,) = restored.record().samples("policy")
        assert row.trained == len(make_renderer().encode("fine")) + 1
    finally:
        await log.close()


@pytest.mark.parametrize(
    "said",
    [
        [{"role": "assistant", "content": "a", "reasoning_content": "x" * 10_000}, USER],
        [{"role": "tool", "content": "a", "tool_call_id": "x" * 10_000}],
    ],
)
async def test_what_no_prompt_shows_counts_as_held(said: list[Any]) -> None:
    async with asking(QWEN_LIKE) as asked:
        asked.script("fine")
        await asked.chat(USER, *said)
        assert "x" not in asked.prompts[0]
        assert asked.served.gateway.sessions.get("s1").held >= 10_000


class SlowToClose:
    """An engine that takes its time after the last token, as one at the other end of a wire may."""

    context = 4096

    def __init__(self) -> None:
        self.may_close = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        renderer = make_renderer()
        try:
            yield chunk([*renderer.encode("hello"), renderer.stop_tokens[0]], finish="stop")
        finally:
            await asyncio.wait_for(self.may_close.wait(), 60)


@pytest.mark.parametrize("leaves", ["connection", "session"])
@pytest.mark.parametrize("choices", [1, 2])
async def test_an_answer_whose_end_was_seen_is_trained_whoever_goes_then(leaves: str, choices: int) -> None:
    async with served() as gateway:
        policies, sessions = gateway.gateway._policies, gateway.gateway.sessions
        engine = SlowToClose()
        policies["policy"].engine = engine
        session = sessions.get("s1")
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="policy", messages=[USER], stream=True, n=choices, timeout=20
            )
            ended = 0
            async for part in stream:
                ended += part.choices[0].finish_reason is not None
                if ended == choices:
                    break
            assert session.at_work
            if leaves == "connection":
                await stream.close()
                await until(lambda: not session.at_work)
            record = sessions.close("s1")
            await stream.close()
        engine.may_close.set()
        assert len(record.samples("policy")) == choices
        await until(lambda: not session.at_work)
        assert len(record.samples("policy")) == choices


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking() as asked:
        encoded: list[str] = []
        monkeypatch.setattr(Renderer, "encode", lambda _, text: encoded.append(text) or [1])
        with pytest.raises(openai.BadRequestError) as refused:
            await asked.chat({"role": "user", "content": "word " * 400_000})
        assert refused.value.code == "context_length_exceeded"
        assert not encoded

"""The OpenAI client of agents in the node's process: the same answers and errors as over HTTP, without HTTP."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from counting_engine import CountingEngine
from rillflow.config import SamplingConfig
from rillflow.gateway import Gateway, Policy, session_url
from rillflow.rollout.direct_client import DirectClient
from tiny_policy import tiny_renderer

ASKED: list[Any] = [{"role": "user", "content": "How many?"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


class Played:
    """A session, with a client that calls its gateway directly and one that does not."""

    def __init__(self, gateway: Gateway, plain: openai.AsyncOpenAI, direct: DirectClient) -> None:
        self.gateway, self.plain, self.direct = gateway, plain, direct
        self.calls: list[str] = []  # the agents of direct calls
        direct.call_directly(self._chat)

    async def _chat(self, body: bytes, agent: str) -> bytes:
        self.calls.append(agent)
        return await self.gateway.chat("s1", body, agent)


@asynccontextmanager
async def playing() -> AsyncIterator[Played]:
    policy = Policy(CountingEngine(context=512), tiny_renderer())
    gateway = Gateway("token", {"agent": policy}, {"agent": SamplingConfig()})
    base = session_url(await gateway.start(), "s1")
    key = gateway.sessions.open("s1", seed=3, group="g", deadline_seconds=120)
    pool = openai.DefaultAioHttpClient(timeout=None)
    make = partial(openai.AsyncOpenAI, base_url=base, api_key=key, max_retries=0, http_client=pool)
    direct = DirectClient(base_url="http://unset", api_key="unset", max_retries=0, http_client=pool)
    try:
        yield Played(gateway, make(), direct.with_options(base_url=base, api_key=key))
    finally:
        await pool.aclose()
        await gateway.stop()


def shown(answer: ChatCompletion) -> dict[str, Any]:
    return answer.model_dump(exclude={"id", "created"})


async def test_answers_are_those_of_http() -> None:
    async with playing() as played:
        for options in ({}, {"n": 2}, {"tools": [TOOL]}, {"logprobs": True}, {"stop": openai.NOT_GIVEN}):
            asked: Any = {"model": "agent", "messages": ASKED, "max_tokens": 5, "seed": 1, **options}
            near, far = [await one.chat.completions.create(**asked) for one in (played.direct, played.plain)]
            assert isinstance(near, ChatCompletion)
            assert shown(near) == shown(far)
        assert len(played.calls) == 5


async def test_an_answer_can_be_sent_back_as_a_message() -> None:
    async with playing() as played:
        first = await played.direct.chat.completions.create(model="agent", messages=ASKED, max_tokens=5)
        messages = [*ASKED, first.choices[0].message, {"role": "user", "content": "And now?"}]
        await played.direct.chat.completions.create(model="agent", messages=messages, max_tokens=5)
        assert len(played.calls) == 2
        (sample,) = played.gateway.sessions.close("s1").samples("agent")
        assert sample.trained == 10, "both answers lie on one path"


async def test_fields_that_the_sdk_does_not_know_are_sent() -> None:
    async with playing() as played:
        with pytest.raises(openai.BadRequestError, match="min_p"):
            await played.direct.chat.completions.create(model="agent", messages=ASKED, extra_body={"min_p": 0.5})
        assert len(played.calls) == 1


async def test_what_is_refused_is_an_error_of_the_sdk() -> None:
    async with playing() as played:
        with pytest.raises(openai.BadRequestError) as refused:
            await played.direct.chat.completions.create(
                model="agent", messages=[{"role": "user", "content": "x" * 9000}]
            )
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await played.direct.chat.completions.create(model="another", messages=ASKED)


async def test_agents_are_named_by_a_header_of_the_client() -> None:
    async with playing() as played:
        named = played.direct.with_options(default_headers={"X-Rillflow-Agent": "planner"})
        for client in (played.direct, named, named.with_options(max_retries=1), named.copy(set_default_headers={})):
            await client.chat.completions.create(model="agent", messages=ASKED, max_tokens=3)
        assert played.calls == ["", "planner", "planner", ""]


async def test_everything_else_goes_over_http() -> None:
    async with playing() as played:
        direct = played.direct
        asked: Any = {"model": "agent", "messages": ASKED, "max_tokens": 3}
        await direct.chat.completions.create(**asked, extra_headers={"x-odd": "1"})
        await direct.chat.completions.create(**asked, timeout=60)
        await direct.with_options(timeout=60).chat.completions.create(**asked)
        raw = await direct.chat.completions.with_raw_response.create(**asked)
        assert raw.status_code == 200
        events = [event async for event in await direct.chat.completions.create(**asked, stream=True)]
        assert events[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.AuthenticationError):
            await direct.with_options(api_key="another").chat.completions.create(**asked)
        with pytest.raises(openai.APIConnectionError):
            await direct.with_options(base_url="http://127.0.0.1:1/v1").chat.completions.create(**asked)
        assert played.calls == []


async def test_it_looks_like_the_sdks_client() -> None:
    async with playing() as played:
        assert isinstance(played.direct, openai.AsyncOpenAI)
        plain, direct = [one.chat.completions.create for one in (played.plain, played.direct)]
        assert inspect.signature(direct) == inspect.signature(plain)

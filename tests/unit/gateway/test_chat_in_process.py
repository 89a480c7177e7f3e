"""A role that asks the gateway of its own process: the same answers, the same errors, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import openai
import pytest

from counting_engine import CountingEngine
from rillflow.agents.roles import PolicyRole
from rillflow.config import GatewayConfig, SamplingConfig
from rillflow.gateway import Gateway, Policy, session_url
from tiny_policy import tiny_renderer

ASKED = [{"role": "user", "content": "How many?"}]


class Roles:
    """The same role, over HTTP and without."""

    def __init__(self, gateway: Gateway, client: openai.AsyncOpenAI) -> None:
        self.direct_calls = 0
        self.gateway = gateway
        self._chat = partial(gateway.chat, "s1")
        self.far = PolicyRole("planner", "agent", lambda: client)
        self.near = PolicyRole("planner", "agent", lambda: client, self._counted)

    async def _counted(self, body: bytes, agent: str) -> bytes:
        self.direct_calls += 1
        return await self._chat(body, agent)


@asynccontextmanager
async def playing(**limits: int) -> AsyncIterator[Roles]:
    policy = Policy(CountingEngine(context=256), tiny_renderer())
    gateway = Gateway("token", {"agent": policy}, {"agent": SamplingConfig()}, limits=GatewayConfig(**limits))
    url = await gateway.start()
    key = gateway.sessions.open("s1", seed=3, group="g", deadline_seconds=120)
    client = openai.AsyncOpenAI(
        base_url=session_url(url, "s1"), api_key=key, max_retries=0, timeout=60,
        default_headers={"x-rillflow-agent": "planner"},
    )  # fmt: skip
    try:
        yield Roles(gateway, client)
    finally:
        await client.close()
        await gateway.stop()


async def test_both_ways_say_the_same_of_an_answer() -> None:
    async with playing() as roles:
        near = await roles.near.ask(ASKED, max_tokens=5, seed=1)
        assert roles.direct_calls == 1
        far = await roles.far.ask(ASKED, max_tokens=5, seed=1)
        assert (near.text, near.uses, near.cut) == (far.text, far.uses, far.cut)
        assert near.message == far.message
        assert near.call != far.call
        record = roles.gateway.sessions.get("s1")
        assert {node.agent for node in record.trees["agent"].nodes() if node.kind == "sampled"} == {"planner"}


async def test_several_answers_have_a_call_each() -> None:
    async with playing() as roles:
        said = await roles.near.ask_many(ASKED, 3, max_tokens=5)
        assert len(said) == 3
        assert len({one.call for one in said}) == 3


async def test_what_is_refused_is_an_error_of_the_client() -> None:
    async with playing() as roles:
        with pytest.raises(openai.BadRequestError) as refused:
            await roles.near.ask([{"role": "user", "content": "x" * 5000}])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await roles.near.ask([])
        odd = PolicyRole("no name!", "agent", lambda: roles.far.client, roles.near._chat)
        assert (await odd.ask(ASKED, max_tokens=3)).text, "the client's own header is another one's"
        roles.gateway.sessions.close("s1")
        with pytest.raises(openai.APIStatusError):
            await roles.near.ask(ASKED)


async def test_what_only_a_client_can_do_goes_over_it() -> None:
    async with playing() as roles:
        said = await roles.near.ask(ASKED, max_tokens=5, extra_headers={"x-odd": "1"})
        assert said.text
        await roles.near.ask(ASKED, max_tokens=5, stop=openai.NOT_GIVEN)
        assert roles.direct_calls == 0


async def test_calls_past_the_bound_are_refused() -> None:
    async with playing(total=1) as roles:
        assert roles.gateway._gate.enter()
        with pytest.raises(openai.APIStatusError, match="at work"):
            await roles.near.ask(ASKED)
        roles.gateway._gate.leave()
        await roles.near.ask(ASKED, max_tokens=3)
        assert roles.gateway._gate.at_work == 0

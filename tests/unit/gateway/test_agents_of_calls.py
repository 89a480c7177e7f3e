"""A call says whose of an episode's agents it is, and the record's samples know."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai_support import USER, asking
from serving import served

from rillflow.errors import EngineError
from rillflow.gateway.server import anthropic_url

WRITER, CRITIC = {"x-rillflow-agent": "writer"}, {"x-rillflow-agent": "critic"}


def turns(gateway: Any) -> list[tuple[str, int]]:
    return [(sample.agent, sample.turn) for sample in gateway.sessions.get("s1").record().samples("policy")]


async def test_samples_know_their_agent_and_its_turn() -> None:
    async with asking() as agent:
        agent.script("a", "b", "c", "d")
        await agent.chat({"role": "user", "content": "write"}, extra_headers=WRITER)
        await agent.chat({"role": "user", "content": "judge"}, extra_headers=CRITIC)
        await agent.respond("write again", extra_headers=WRITER)
        await agent.chat({"role": "user", "content": "who asks?"})
        assert turns(agent.served.gateway) == [("writer", 0), ("critic", 0), ("writer", 1), ("", 0)]


async def test_the_choices_of_a_call_are_one_turn_and_failed_calls_are_none() -> None:
    async with asking() as agent:
        agent.script("a", "b")
        agent.served.engine.scripts.append([EngineError("broken")])
        await agent.chat(n=2, extra_headers=WRITER)
        with pytest.raises(openai.InternalServerError, match="broken"):
            await agent.chat({"role": "user", "content": "nothing comes"}, extra_headers=WRITER)
        agent.script("c")
        await agent.chat({"role": "user", "content": "more"}, extra_headers=WRITER)
        assert turns(agent.served.gateway) == [("writer", 0), ("writer", 0), ("writer", 1)]


async def test_a_path_that_two_agents_made_is_of_the_first_whose_answer_trains_there() -> None:
    async with asking() as agent:
        agent.script("a", "b", "c")
        await agent.chat(USER, extra_headers=WRITER)
        said = {"role": "assistant", "content": "a"}
        await agent.chat(USER, said, {"role": "user", "content": "judge"}, extra_headers=CRITIC)
        await agent.chat(USER, said, {"role": "user", "content": "go on"}, extra_headers=CRITIC)
        assert turns(agent.served.gateway) == [("writer", 0), ("critic", 1)]


async def test_any_client_can_say_it() -> None:
    import anthropic

    async with served() as gateway:
        gateway.script("a")
        client = anthropic.AsyncAnthropic(
            base_url=anthropic_url(gateway.url, "s1"), api_key=gateway.key, max_retries=0, default_headers=CRITIC
        )
        async with client:
            await client.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        assert turns(gateway.gateway) == [("critic", 0)]


@pytest.mark.parametrize("name", ["", "two words", "é", "x" * 101, "../up"])
async def test_a_name_that_is_none_is_refused(name: str) -> None:
    async with served() as gateway:
        body = {"model": "policy", "messages": [USER]}
        status, answer, _ = await gateway.call(
            "POST", "/s/s1/v1/chat/completions", json=body, headers={"x-rillflow-agent": name}
        )
        assert status == 400
        assert "x-rillflow-agent" in answer["error"]["message"]

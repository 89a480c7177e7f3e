"""Agents from outside in odd moments: long tasks, large numbers, words that come while their session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from rollout_support import TOKEN, World, call, task, until

from rillflow.agents.outside import Feed
from rillflow.gateway import Gateway
from rillflow.gateway.feed import OutsideTask
from rillflow.rollout import node
from rillflow.types import Prompt, Task
from rillflow.wire.messages import Request

BIG = 10**30  # JSON has such numbers, msgpack has not


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "HEARTBEAT_EVERY", 0.05)


async def first(feed: Feed) -> OutsideTask:
    async with asyncio.timeout(20):
        async for one in feed:
            return one
    raise AssertionError("the run has ended")


def asking(world: World) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(world.url, headers={"authorization": f"Bearer {TOKEN}"})


async def test_a_task_may_be_long(tmp_path: Path) -> None:
    """Longer than what an HTTP client takes for a line."""
    document = "word " * 200_000
    long = Task(id="g.0", prompt=Prompt(id="p", payload={"text": document}), group="g", place=0, lane="train", seed=0)
    async with World(tmp_path, [long, task(1)]) as world, Feed(world.url, TOKEN, capacity=2, patience=20.0) as feed:
        got: list[OutsideTask] = []
        async with asyncio.timeout(20):
            async for one in feed:
                got.append(one)
                if len(got) == 2:
                    break
    assert [one.prompt.payload for one in got] == [{"text": document}, {"question": "what is 1?"}]


async def test_an_answer_may_be_a_large_number(tmp_path: Path) -> None:
    """It is kept as it was said, for the node that comes after as well."""
    seen: list[Any] = []

    async def reward(payload: dict[str, Any], answer: Any) -> float:
        seen.append(answer)
        if len(seen) == 1:
            await asyncio.sleep(600)
        return 1.0

    async with World(tmp_path, 1, reward=reward) as world, Feed(world.url, TOKEN) as feed:
        one = await first(feed)
        await call(one.base_url, one.api_key)
        ending = asyncio.create_task(feed.end(one, answer={"n": BIG}))
        await until(lambda: seen or ending.done())
        assert not ending.done()
        ending.cancel()
    async with World(tmp_path, 0, reward=reward) as world:
        await world.dataflow.until(1)
    assert seen == [{"n": BIG}] * 2
    assert [done.reward for done in world.dataflow.done] == [1.0]


async def test_a_leafs_number_may_be_nonsense(tmp_path: Path) -> None:
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed, asking(world) as http:
        one = await first(feed)
        await call(one.base_url, one.api_key)
        for body in (f'{{"value": 1, "leaf": {BIG}}}', f'{{"value": 1, "leaf": {BIG}, "policy": "agent"}}'):
            async with http.post(f"/s/{one.session}/reward", data=body.encode()) as reply:
                assert reply.status == 400
        assert (await feed.end(one, reward=1.0)).accepted


class Slowly:
    """A body whose end is sent when the test says so."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self) -> AsyncIterator[bytes]:
        yield self._parts[0]
        self.begun.set()
        await self.go_on.wait()
        yield self._parts[1]


async def test_a_reward_whose_session_ended_while_it_was_sent_is_not_acknowledged(tmp_path: Path) -> None:
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed, asking(world) as http:
        one = await first(feed)
        await call(one.base_url, one.api_key)
        body = Slowly(b'{"value": ', b"5}")
        giving = asyncio.create_task(http.post(f"/s/{one.session}/reward", data=body()))
        await asyncio.wait_for(body.begun.wait(), 20)
        await asyncio.sleep(0.1)  # the gateway has the head
        assert (await feed.end(one, reward=1.0)).accepted
        body.go_on.set()
        async with await asyncio.wait_for(giving, 20) as reply:
            assert reply.status == 404


async def test_an_end_that_comes_while_another_is_taken_has_the_same_answer(tmp_path: Path) -> None:
    async with World(tmp_path, 1, late_rewards=600) as world, Feed(world.url, TOKEN) as feed, asking(world) as http:
        one = await first(feed)
        await call(one.base_url, one.api_key)
        body = Slowly(b"{", b"}")
        ending = asyncio.create_task(http.post(f"/s/{one.session}/end", data=body()))
        await asyncio.wait_for(body.begun.wait(), 20)
        await asyncio.sleep(0.1)
        assert (await feed.end(one)).accepted
        body.go_on.set()
        async with await asyncio.wait_for(ending, 20) as reply:
            assert (reply.status, (await reply.json())["accepted"]) == (200, True)


async def test_who_has_gone_takes_no_task(tmp_path: Path) -> None:
    """Its session would have no owner until its deadline."""
    async with World(tmp_path, 0) as world:
        world.feed.offer("s", lambda: pytest.fail("it was taken"))
        request = Request("POST", "/sessions", "", {"authorization": f"Bearer {TOKEN}"})
        request.add(b"{}")
        request.end()
        request.lose()
        answer = await world.gateway._answer(world.gateway._admitted(request).endpoint, request)
        assert answer.status == 499
        assert world.feed.wanted() == 0
        assert world.feed.join(1).given


async def test_a_tool_may_be_called_with_a_large_number(tmp_path: Path) -> None:
    """The history is on disk as it was, and found again after a restart."""
    function = {"name": "factor", "arguments": f'{{"n": {BIG}}}'}
    history: Any = [
        {"role": "user", "content": "factor it"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed:
        port = int(world.url.rsplit(":", 1)[1])
        one = await first(feed)
        async with openai.AsyncOpenAI(base_url=one.base_url, api_key=one.api_key, max_retries=0) as client:
            said = await client.chat.completions.create(model="agent", messages=history, max_tokens=8)
        before = world.gateway.sessions.get(one.session).trees["agent"]
    async with World(tmp_path, 0, port=port) as world:
        after = world.gateway.sessions.get(one.session).trees["agent"]
        assert [node.messages for node in after.nodes()] == [node.messages for node in before.nodes()]
        history += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        async with openai.AsyncOpenAI(base_url=one.base_url, api_key=one.api_key, max_retries=0) as client:
            await client.chat.completions.create(model="agent", messages=history, max_tokens=8)
        assert len(after.leaves()) == 1


async def test_an_end_may_come_as_soon_as_the_gateway_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents try again all the time while it is away: the first that it hears may be an end."""
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed:
        one = await first(feed)
        await call(one.base_url, one.api_key)
    start, ending = Gateway.start, []

    async def end(url: str) -> int:
        head, path = {"authorization": f"Bearer {TOKEN}"}, f"/s/{one.session}/end"
        async with aiohttp.ClientSession(url, headers=head) as http, http.post(path, json={"reward": 0.5}) as reply:
            return reply.status

    async def started(gateway: Gateway, *where: Any) -> str:
        url = await start(gateway, *where)
        ending.append(asyncio.create_task(end(url)))
        await asyncio.wait(ending, timeout=0.3)
        return url

    monkeypatch.setattr(Gateway, "start", started)
    async with World(tmp_path, 0) as world:
        assert await asyncio.wait_for(ending[0], 20) == 200
    assert [done.reward for done in world.dataflow.done] == [0.5]

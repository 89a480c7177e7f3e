"""Agents from outside: they take tasks as they have hands free, and a node that is started again is a pause to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from rollout_support import TOKEN, World, call, until

from rillflow.agents.outside import Feed
from rillflow.contracts import Episode
from rillflow.errors import LeaseLost, Unauthorized
from rillflow.gateway import control
from rillflow.gateway.feed import OutsideTask
from rillflow.rollout import node, players
from rillflow.types import Ack, CompleteTask


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "HEARTBEAT_EVERY", 0.05)


async def say(task: OutsideTask, text: str = "hello") -> Any:
    return await call(task.base_url, task.api_key, text)


async def taken(feed: Feed, count: int) -> list[OutsideTask]:
    """The next tasks of a feed that stays connected while they are played."""
    tasks: list[OutsideTask] = []
    async with asyncio.timeout(20):
        async for task in feed:
            tasks.append(task)
            if len(tasks) == count:
                break
    return tasks


@asynccontextmanager
async def asking(url: str, token: str = TOKEN) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, headers={"authorization": f"Bearer {token}"}) as http:
        yield http


async def test_a_fleet_plays_everything_with_two_hands(tmp_path: Path) -> None:
    most = playing = 0

    async def work(feed: Feed, task: OutsideTask) -> None:
        nonlocal playing
        await say(task)
        playing -= 1
        assert (await feed.end(task, reward=1.0)).accepted

    async with World(tmp_path, 6) as world, Feed(world.url, TOKEN, capacity=2) as feed, asyncio.TaskGroup() as group:
        async for task in feed:
            playing += 1
            most = max(most, playing)
            group.create_task(work(feed, task))
            if task.prompt.id == "p5":
                group.create_task(ended(world, 6))
    assert most == 2
    assert sorted(done.task for done in world.dataflow.done) == [f"g.{n}" for n in range(6)]
    assert {done.reward for done in world.dataflow.done} == {1.0}
    assert all(ask.want <= 2 for ask in world.dataflow.asked)


async def ended(world: World, count: int) -> None:
    """The run ends once all is played; then the feeds end by themselves."""
    await world.dataflow.until(count)
    await world.end()
    world.feed.close()


async def test_nothing_is_leased_that_nobody_asks_for(tmp_path: Path) -> None:
    async with World(tmp_path, 2) as world:
        await asyncio.sleep(0.3)
        assert not world.dataflow.asked
        async with asking(world.url) as http, http.post("/sessions", json={"wait": 20}) as reply:
            assert reply.status == 200
            told = await reply.json()
        assert [ask.want for ask in world.dataflow.asked] == [1]
        assert len(world.dataflow.tasks) == 1
    assert told["session"] == "g.0-a"
    assert told["prompt"] == {"id": "p0", "payload": {"question": "what is 0?"}, "source": ""}
    assert (told["model"], told["policies"], told["seed"]) == ("agent", ["agent"], 0)
    assert told["base_url"] == f"{told['anthropic_url']}/v1" == f"{world.url}/s/g.0-a/v1"
    assert 50 < told["seconds"] <= 60


async def test_one_task_at_a_time_without_the_client(tmp_path: Path) -> None:
    async with World(tmp_path, 1, givers="agent") as world, asking(world.url) as http:
        async with http.post("/sessions", json={"wait": 20}) as reply:
            task = await reply.json()
        await call(task["base_url"], task["api_key"])
        own = {"authorization": f"Bearer {task['api_key']}"}
        for _ in range(2):  # the second time because the first answer was not heard
            async with http.post("/s/g.0-a/end", json={"reward": 0.5}, headers=own) as reply:
                assert (reply.status, (await reply.json())["accepted"]) == (200, True)
        async with http.post("/sessions", json={}) as reply:
            assert reply.status == 204
        await world.end()
        world.feed.close()
        async with http.post("/sessions", json={}) as reply:
            assert reply.status == 410
    assert [done.reward for done in world.dataflow.done] == [0.5]


async def test_after_its_end_a_session_answers_no_call(tmp_path: Path) -> None:
    async with World(tmp_path, 1, late_rewards=600) as world, Feed(world.url, TOKEN) as feed:
        (task,) = await taken(feed, 1)
        await say(task)
        ended = await feed.end(task)
        assert (ended.accepted, "awaited" in ended.reason) == (True, True)
        with pytest.raises(openai.NotFoundError):
            await say(task)


@pytest.mark.parametrize(
    ("body", "cause", "error"),
    [
        ({"error": "my tool broke"}, "agent_error", "my tool broke"),
        ({}, "reward_error", "no reward in time"),
        ({"reward": {"unknown": 1.0}}, "reward_error", "names no policy 'unknown'"),
    ],
)
async def test_ends_that_are_failures(tmp_path: Path, body: dict[str, Any], cause: str, error: str) -> None:
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed:
        (task,) = await taken(feed, 1)
        await say(task)
        ended = await feed.end(task, **body)
        assert not ended.accepted
        assert error in ended.reason
    (failed,) = world.dataflow.failed
    assert failed.cause == cause


async def test_the_recipes_reward_function_gets_the_agents_answer(tmp_path: Path) -> None:
    def reward(payload: dict[str, Any], answer: Any) -> float:
        return float(answer == {"text": payload["question"]})

    async with World(tmp_path, 1, reward=reward) as world, Feed(world.url, TOKEN) as feed:
        (task,) = await taken(feed, 1)
        await say(task)
        assert (await feed.end(task, answer={"text": "what is 0?"})).accepted
    assert [done.reward for done in world.dataflow.done] == [1.0]


async def test_an_agent_that_goes_away_is_a_timeout(tmp_path: Path) -> None:
    async with World(tmp_path, 1, episode_timeout=0.5) as world:
        async with Feed(world.url, TOKEN) as feed:
            (task,) = await taken(feed, 1)
            with suppress(openai.APIStatusError):  # the half second may be over; the outcome is the same
                await say(task)
        await world.dataflow.until(1)
        async with Feed(world.url, TOKEN) as feed:
            assert not (await feed.end(task, reward=1.0)).accepted
    assert [failed.cause for failed in world.dataflow.failed] == ["timeout"]


async def test_a_task_whose_asker_left_goes_back_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(players, "UNTAKEN_SECONDS", 0.05)
    async with World(tmp_path, 1) as world:
        asker = world.feed.join(1)
        await until(lambda: not world.dataflow.tasks)
        world.feed.leave(asker)
        await until(lambda: not world.node._playing)
        assert len(world.gateway.sessions) == 0
    assert not world.dataflow.done
    assert not world.dataflow.failed


async def test_who_may_do_what(tmp_path: Path) -> None:
    async with World(tmp_path, 2) as world, Feed(world.url, TOKEN, capacity=2) as feed:
        one, other = await taken(feed, 2)
        with pytest.raises(Unauthorized):
            async with Feed(world.url, one.api_key) as stranger:
                await taken(stranger, 1)
        async with asking(world.url, one.api_key) as http:
            for path in ("/sessions", f"/s/{other.session}/end", f"/s/{other.session}/reward"):
                async with http.post(path, json={"value": 1.0}) as reply:
                    assert reply.status == 401


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/s/g.0-a/reward", b'{"value": "much"}', 400),
        ("/s/g.0-a/reward", b'{"value": 1, "to": "me"}', 400),
        ("/s/g.0-a/reward", b'{"value": 1e999}', 400),
        ("/s/g.0-a/reward", b'{"value": 1, "call": "chatcmpl-unknown"}', 404),
        ("/s/g.0-a/reward", b'{"value": 1, "turn": 0, "leaf": 0}', 400),
        ("/s/g.0-a/end", b'{"reward": [1]}', 400),
        ("/s/g.0-a/end", b"\xff", 400),
        ("/s/unknown/end", b"{}", 404),
        ("/sessions", b'{"wait": null}', 400),
    ],
)
async def test_bad_words_change_nothing(tmp_path: Path, path: str, body: bytes, status: int) -> None:
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed, asking(world.url) as http:
        (task,) = await taken(feed, 1)
        async with http.post(path, data=body) as reply:
            assert reply.status == status
            assert "error" in await reply.json()
        await say(task)
        assert (await feed.end(task, reward=1.0)).accepted


@pytest.mark.parametrize("capacity", ["0", "-1", "x", "99999999999", "1.5"])
async def test_capacity_is_a_number(tmp_path: Path, capacity: str) -> None:
    async with World(tmp_path, 0) as world, asking(world.url) as http:
        async with http.get("/feed", params={"capacity": capacity}) as reply:
            assert reply.status == 400
        assert world.feed.wanted() == 0


async def test_a_feed_shows_that_it_lives_and_is_left_with_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "KEEP_ALIVE", 0.02)
    async with World(tmp_path, 0) as world, asking(world.url) as http:
        async with http.get("/feed", params={"capacity": "3"}) as reply:
            assert await reply.content.readline() == b"\n"
            assert world.feed.wanted() == 3
        await until(lambda: world.feed.wanted() == 0)


async def test_only_what_was_taken_from_the_feed_is_ended_there(tmp_path: Path) -> None:
    """An agent that is played by a workflow has a key, too."""
    asked: list[int] = []

    async def ends_itself(episode: Episode) -> float:
        key = episode.api_key
        async with asking(world.url, key) as http:
            for body in ({"reward": 100.0}, {}):
                async with http.post("/s/g.0-a/end", json=body) as reply:
                    asked.append(reply.status)
        await call(episode.base_url, episode.api_key)
        return 0.5

    async with World(tmp_path, 1, workflow=ends_itself) as world:
        await world.dataflow.until(1)
    assert asked == [403, 409]
    assert [done.reward for done in world.dataflow.done] == [0.5]


# ---------------------------------------------------------------- a node that is started again


async def test_a_session_outlives_its_node(tmp_path: Path) -> None:
    """The agent's key, history and lease are the same; its feed reconnects."""
    async with World(tmp_path, 1) as world:
        port = int(world.url.rsplit(":", 1)[1])
        feed = Feed(world.url, TOKEN, capacity=1)
        async with feed:
            (task,) = await taken(feed, 1)
            before = await say(task)
        first = world.incarnation
    async with World(tmp_path, 0, port=port) as world, feed:
        assert world.incarnation == first
        history = [{"role": "user", "content": "hello"}, before.choices[0].message.model_dump(exclude_none=True)]
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            messages: Any = [*history, {"role": "user", "content": "and then?"}]
            await client.chat.completions.create(model="agent", messages=messages, max_tokens=8)
        assert world.node._beat().attempts == ["g.0-a"]
        assert (await feed.end(task, reward=1.0)).accepted
        (done,) = world.dataflow.done
        (sample,) = done.samples  # the second call has extended the first: one leaf
        assert done.calls == 2
        assert sample.trained == 6
        (columns,) = world.unit.get([sample.row], ["mask"])
        assert np.frombuffer(columns["mask"], "u1").sum() == 6


async def test_an_end_that_was_said_is_carried_out_by_the_next_node(tmp_path: Path) -> None:
    """The agent may be gone by then: its word is on disk before anything follows from it."""
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed:
        pushing = asyncio.Event()

        async def hangs(news: CompleteTask, deadline: float) -> Ack:
            pushing.set()
            await asyncio.sleep(600)
            raise AssertionError

        world.dataflow.complete = hangs
        (task,) = await taken(feed, 1)
        await say(task)
        ending = asyncio.create_task(feed.end(task, reward=0.5))
        await asyncio.wait_for(pushing.wait(), 20)
        ending.cancel()
    async with World(tmp_path, 0) as world:
        await world.dataflow.until(1)
        # And an agent that is still connected learns of it.
        async with asking(world.url) as http, http.post("/s/g.0-a/end", json={"reward": 0.5}) as reply:
            assert (reply.status, (await reply.json())["accepted"]) == (200, True)
    assert [(done.attempt, done.reward) for done in world.dataflow.done] == [("g.0-a", 0.5)]
    async with World(tmp_path, 0) as world:
        assert len(world.gateway.sessions) == 0


async def test_what_the_node_before_had_told_is_told_once(tmp_path: Path) -> None:
    """Its last word may have been taken although it died before it knew: the ledger says so, and that is the end."""
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed:

        async def taken_before(news: CompleteTask, deadline: float) -> Ack:
            raise LeaseLost("attempt 'g.0-a' was completed before, with another payload")

        world.dataflow.complete = taken_before
        (task,) = await taken(feed, 1)
        await say(task)
        ended = await feed.end(task, reward=0.5)
        assert (ended.accepted, "completed before" in ended.reason) == (True, True)

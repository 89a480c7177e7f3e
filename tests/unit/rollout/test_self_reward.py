"""The recipe's reward is final: an agent that rewards itself gets a refusal, and nothing that it sends counts."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rollout_support import TOKEN, World, call, until

from rillflow.agents.command import CommandAgent
from rillflow.agents.outside import Feed
from rillflow.config.rollout import CommandConfig
from rillflow.rollout.players import CommandPlayer

GREEDY = """
import json, os, urllib.error, urllib.request

base, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["OPENAI_API_KEY"]
reward_url, bearer = os.environ["RILLFLOW_REWARD_URL"], {"authorization": f"Bearer {key}"}


def post(url, body, headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


said = post(f"{base}/v1/chat/completions", {
    "model": "agent", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]
}, bearer)[1]
tries = {
    "session": post(reward_url, {"value": 100}, bearer),
    "again": post(reward_url, {"value": 100}, bearer),
    "leaf": post(reward_url, {"value": 100, "leaf": 0}, bearer),
    "turn": post(reward_url, {"value": 100, "turn": 0}, bearer),
    "call": post(reward_url, {"value": 100, "call": said["id"]}, bearer),
    "policy": post(reward_url, {"value": 100, "policy": "agent"}, bearer),
    "leaf of a policy": post(reward_url, {"value": 100, "leaf": 0, "policy": "agent"}, bearer),
    "x-api-key": post(reward_url, {"value": 100}, {"x-api-key": key}),
    "not a number": post(reward_url, b'{"value": NaN}', bearer),
    "another session": post(reward_url.replace("g.0-a", "g.1-a"), {"value": 100}, bearer),
    "no key": post(reward_url, {"value": 100}, {}),
    "end": post(f"{base}/end", {"reward": 100}, bearer),
}
open(os.environ["RILLFLOW_ANSWER"], "w").write(json.dumps(tries))
print(json.dumps({"reward": 100}))
"""
REFUSED = ("session", "again", "leaf", "turn", "call", "policy", "leaf of a policy", "x-api-key", "not a number", "end")


@pytest.mark.parametrize("key", ["authorization", "x-api-key"])
async def test_an_agent_that_rewards_itself_in_many_ways_gets_the_recipes_reward(tmp_path: Path, key: str) -> None:
    """By every target, key and time: what reaches the ledger, sample and column, is the recipe's."""
    seen: list[Any] = []
    graded = asyncio.Event()

    async def reward(payload: dict[str, Any], answer: Any) -> float:
        seen.append(answer)
        await asyncio.wait_for(graded.wait(), 20)
        return 0.25

    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    agent = CommandAgent(CommandConfig(run=shlex.join([sys.executable, str(script)])), tmp_path / "agents")
    async with World(tmp_path, 1, player=CommandPlayer(agent), reward=reward) as world:
        await until(lambda: seen)
        own = world.gateway.sessions.get("g.0-a").key
        header = {key: own if key == "x-api-key" else f"Bearer {own}"}
        async with aiohttp.ClientSession(headers=header) as http:
            for target in ({}, {"leaf": 0}):  # the program has ended, its reward is being computed
                async with http.post(f"{world.url}/s/g.0-a/reward", json={"value": 100.0, **target}) as reply:
                    assert reply.status == 403
            graded.set()
            await world.dataflow.until(1)
            await until(lambda: not len(world.gateway.sessions))
            async with http.post(f"{world.url}/s/g.0-a/reward", json={"value": 100.0}) as reply:
                assert reply.status == 404
        (done,) = world.dataflow.done
        assert not world.dataflow.failed
        (columns,) = world.unit.get([done.samples[0].row], ["rewards", "transcript"])
    tries = json.loads(seen[0]["answer"])
    assert {name for name, (status, _) in tries.items() if status == 403} == set(REFUSED)
    assert "the recipe's `reward` function gives the rewards" in json.dumps(tries["session"])
    assert (tries["another session"][0], tries["no key"][0]) == (401, 401)
    assert (done.reward, [sample.reward for sample in done.samples]) == (0.25, [0.25])
    assert "rewards" not in columns
    assert b"100" not in columns["transcript"]
    assert done.metrics["rewards_refused"] == len(REFUSED) + 2


async def test_a_sessions_key_rewards_nothing_unless_the_recipe_says_so(tmp_path: Path) -> None:
    """The run's token does, where the recipe has no reward function."""
    async with World(tmp_path, 1) as world, Feed(world.url, TOKEN) as feed, aiohttp.ClientSession() as http:
        task = await anext(aiter(feed))
        await call(task.base_url, task.api_key)
        own, url = {"authorization": f"Bearer {task.api_key}"}, f"{world.url}/s/{task.session}"
        for path, body in (("reward", {"value": 1.0}), ("end", {"reward": 1.0})):
            async with http.post(f"{url}/{path}", json=body, headers=own) as reply:
                assert reply.status == 403
                assert "`rewards: agent`" in await reply.text()
        assert (await feed.end(task, reward=0.5)).accepted
    assert [(done.reward, done.metrics["rewards_refused"]) for done in world.dataflow.done] == [(0.5, 2.0)]


async def test_not_even_the_runs_token_overrules_a_reward_function(tmp_path: Path) -> None:
    async with World(tmp_path, 1, reward=lambda payload, answer: 0.25) as world, Feed(world.url, TOKEN) as feed:
        task = await anext(aiter(feed))
        await call(task.base_url, task.api_key)
        with pytest.raises(Exception, match="403"):
            await feed.end(task, reward=1.0)
        assert (await feed.end(task, answer="42")).accepted
    assert [(done.reward, done.samples[0].reward) for done in world.dataflow.done] == [(0.25, 0.25)]

"""An episode that ends without an answer is worth what the recipe's `ends` says, or is retried."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rollout_support import Says, World, call, until

from rillflow.agents.command import CommandAgent
from rillflow.agents.outside import Feed
from rillflow.config.rollout import CommandConfig
from rillflow.contracts import Episode
from rillflow.errors import EngineError
from rillflow.rollout.players import CommandPlayer, Player
from rillflow.rollout.rewards import RewardRules
from rillflow.types import Chunk, GenerateRequest
from tiny_policy import tiny_renderer

TOKEN = "t" * 32
AGENT = """
import json, os, sys, urllib.request

if sys.argv[1] == "asks":
    body = {"model": "agent", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60).read()
sys.exit(int(sys.argv[2]))
"""


async def zero(payload: dict[str, Any], answer: Any) -> float:
    raise AssertionError("an end without an answer has no answer to be judged")


def command(folder: Path, *words: str) -> Player:
    script = folder / "agent.py"
    script.write_text(AGENT)
    return CommandPlayer(
        CommandAgent(CommandConfig(run=shlex.join([sys.executable, str(script), *words])), folder / "agents")
    )


async def ended(folder: Path, ends: Mapping[str, float | str], **world: Any) -> World:
    async with World(folder, 1, rules=RewardRules(ends=ends), **world) as played:
        await played.dataflow.until(1)
    return played


def rewarded(world: World) -> list[tuple[str, float, list[float]]]:
    assert not world.dataflow.failed
    return [(done.end, done.reward, [sample.reward for sample in done.samples]) for done in world.dataflow.done]


def failed(world: World) -> list[str]:
    assert not world.dataflow.done
    return [failure.cause for failure in world.dataflow.failed]


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("ends", "end"),
    [
        ({"agent_error": 0.0}, ("agent_error", 0.0, [0.0])),
        ({"agent_error.3": -1.0, "agent_error": 0.5}, ("agent_error.3", -1.0, [-1.0])),
        ({"agent_error.3": "retry", "agent_error": 0.5}, None),
        ({"agent_error.4": 0.0, "timeout": 0.0}, None),
        ({}, None),
    ],
)
async def test_an_exit_code_is_a_reward_where_the_recipe_says_so(
    tmp_path: Path, ends: dict[str, float | str], end: tuple[str, float, list[float]] | None
) -> None:
    world = await ended(tmp_path, ends, player=command(tmp_path, "asks", "3"), reward=zero)
    if end is None:
        assert failed(world) == ["agent_error"]
    else:
        assert rewarded(world) == [end]


async def test_a_program_that_asked_nothing_is_retried_and_says_why(tmp_path: Path) -> None:
    world = await ended(tmp_path, {"agent_error": 0.0}, player=command(tmp_path, "crashes", "1"), reward=zero)
    assert failed(world) == ["agent_error"]
    assert "ended with code 1" in world.dataflow.failed[0].error


# ---------------------------------------------------------------- workflows


async def ask(episode: Episode) -> None:
    await episode.role("agent").ask([{"role": "user", "content": "hello"}])


async def cannot_read_it(episode: Episode) -> float:
    await ask(episode)
    raise ValueError("the answer is not JSON")


async def hangs(episode: Episode) -> float:
    await ask(episode)
    await asyncio.sleep(3600)
    return 1.0


@pytest.mark.parametrize(
    ("ends", "end"),
    [
        ({"workflow_error": 0.0}, ("workflow_error", 0.0, [0.0])),
        ({"workflow_error.ValueError": 0.25}, ("workflow_error.ValueError", 0.25, [0.25])),
        ({"workflow_error.KeyError": 0.25}, None),
    ],
)
async def test_an_exception_is_a_reward_where_the_recipe_says_so(
    tmp_path: Path, ends: dict[str, float | str], end: tuple[str, float, list[float]] | None
) -> None:
    world = await ended(tmp_path, ends, workflow=cannot_read_it)
    if end is None:
        assert failed(world) == ["workflow_error"]
    else:
        assert rewarded(world) == [end]


async def test_a_timeout_is_a_reward_where_the_recipe_says_so(tmp_path: Path) -> None:
    world = await ended(tmp_path, {"timeout": 0.0}, workflow=hangs, episode_timeout=0.5)
    assert rewarded(world) == [("timeout", 0.0, [0.0])]


class Breaks(Says):
    """Answers once; then the engine is broken."""

    def __init__(self) -> None:
        super().__init__(tiny_renderer())
        self._asked = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._asked += 1
        if self._asked > 1:
            raise EngineError("out of memory")
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_that_our_own_fault_caused_is_never_a_reward(tmp_path: Path, stream: bool) -> None:
    async def play(episode: Episode) -> float:
        await ask(episode)
        asked: Any = {"model": "agent", "messages": [{"role": "user", "content": "more"}], "stream": stream}
        await episode.client.chat.completions.create(**asked)
        return 1.0

    world = await ended(tmp_path, {"workflow_error": 0.0}, workflow=play, sources={"agent": Breaks()})
    assert failed(world) == ["workflow_error"]
    assert "out of memory" in world.dataflow.failed[0].error


# ---------------------------------------------------------------- agents from outside


async def test_an_error_of_an_agent_from_outside_is_a_reward_where_the_recipe_says_so(tmp_path: Path) -> None:
    async with World(tmp_path, 1, rules=RewardRules(ends={"agent_error": 0.0})) as world:
        async with Feed(world.url, TOKEN) as feed:
            task = await anext(aiter(feed))
            await call(task.base_url, task.api_key)
            assert (await feed.end(task, error="the answer is not JSON")).accepted
        await until(lambda: world.dataflow.done)
    assert rewarded(world) == [("agent_error", 0.0, [0.0])]

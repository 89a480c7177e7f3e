"""The held-out reward of a model that one of the sides has trained, measured by the same code."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from bench import endtoend_task as task
from rillflow.config import EngineConfig, PolicyConfig, SamplingConfig
from rillflow.contracts import SystemClock
from rillflow.engine.build import build_engine
from rillflow.examples import stockroom
from rillflow.examples.stockroom import play as play_stockroom
from rillflow.gateway import Gateway, Policy, Renderer, anthropic_url
from rillflow.rollout.episode import RunningEpisode
from rillflow.types import Prompt, Task

PROMPTS = 256
_SECONDS = 300.0


def heldout_reward(case: str, model: str, seed: int) -> float:
    """The mean reward of one sampled answer to each of PROMPTS prompts."""
    return asyncio.run(_mean(case, model, seed))


async def _mean(case: str, model: str, seed: int) -> float:
    tools = case == "tools"
    rows = list(stockroom.prompts("heldout", PROMPTS, seed) if tools else task.prompts(case, PROMPTS, seed + 1000))
    play, score = (play_stockroom, stockroom.reward) if tools else (task.play, task.reward)
    policy = PolicyConfig(
        model=model,
        sampling=SamplingConfig(temperature=1.0, max_tokens=32),
        engine=EngineConfig(slots=64, context=320),
    )
    engine = build_engine(policy, exact=False)
    await engine.start()
    gateway = Gateway("token", {"agent": Policy(engine, Renderer.load(model))}, {"agent": policy.sampling})
    client = openai.AsyncOpenAI(
        base_url="http://unset", api_key="unset", http_client=openai.DefaultAioHttpClient(timeout=None)
    )
    try:
        client = client.with_options(base_url=await gateway.start())
        played = [_episode(play, gateway, client, row, number) for number, row in enumerate(rows)]
        answers = await asyncio.gather(*played)
    finally:
        await client.close()
        await gateway.stop()
        await engine.close()
    return statistics.mean(score(row["payload"], answer) for row, answer in zip(rows, answers, strict=True))


async def _episode(
    play: Callable[[Any], Awaitable[str | None]],
    gateway: Gateway,
    client: openai.AsyncOpenAI,
    row: dict[str, Any],
    number: int,
) -> str | None:
    given = Task(id=f"h.{number}", prompt=Prompt(**row), group=f"h{number}", place=0, lane="eval", seed=number)
    key = gateway.sessions.open(given.id, seed=number, group=given.group, deadline_seconds=_SECONDS)
    episode = RunningEpisode(
        given,
        client=client,
        policies=["agent"],
        url=anthropic_url(str(client.base_url).rstrip("/"), given.id),
        api_key=key,
        clock=SystemClock(),
        seconds=_SECONDS,
        give=gateway.sessions.get(given.id).rewards.give,
    )
    try:
        return await play(episode)
    finally:
        gateway.sessions.close(given.id)

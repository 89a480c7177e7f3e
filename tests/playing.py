"""Episodes of the stockroom through a real gateway, for any engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from rillflow.config import SamplingConfig
from rillflow.contracts import SystemClock, TokenSource
from rillflow.examples.stockroom import play, prompts
from rillflow.gateway import Gateway, Policy, anthropic_url
from rillflow.gateway.trees.record import Sample
from rillflow.rollout.episode import RunningEpisode
from rillflow.types import Prompt, Task
from tiny_policy import tiny_renderer


async def play_episodes(engine: TokenSource, sampling: SamplingConfig, count: int) -> list[Sample]:
    gateway = Gateway("token", {"agent": Policy(engine, tiny_renderer())}, {"agent": sampling})
    url = await gateway.start()
    client = openai.AsyncOpenAI(api_key="unset", base_url=url, http_client=openai.DefaultAioHttpClient())

    async def episode(index: int, row: dict[str, Any]) -> list[Sample]:
        task = Task(id=f"t.{index}", prompt=Prompt(**row), group="t", place=index, lane="train", seed=index)
        key = gateway.sessions.open(task.id, seed=task.seed, group="t", deadline_seconds=60)
        running = RunningEpisode(
            task, client=client, policies=["agent"], url=anthropic_url(url, task.id), api_key=key,
            clock=SystemClock(), seconds=60, give=gateway.sessions.get(task.id).rewards.give,
        )  # fmt: skip
        await play(running)
        return gateway.sessions.close(task.id).samples("agent")

    try:
        rows = list(prompts("train", count, 0))
        played = await asyncio.gather(*(episode(index, row) for index, row in enumerate(rows)))
        return [sample for samples in played for sample in samples]
    finally:
        await client.close()
        await gateway.stop()

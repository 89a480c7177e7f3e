"""From the engine to the trainer nothing changes: same ids, and log-probs that the trainer's forward agrees with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
import torch

from rillflow.agents.environments.stockroom import prompts
from rillflow.agents.workflows.stockroom import play
from rillflow.config import SamplingConfig
from rillflow.contracts import SystemClock
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.gateway import Gateway, Policy, Renderer, session_url
from rillflow.gateway.record import Sample
from rillflow.rollout.episode import RunningEpisode
from rillflow.trainer.batches import make_rows
from rillflow.trainer.forward import PolicyForward
from rillflow.trainer.packing import Plan, collate, input_length
from rillflow.types import BatchSample, Chunk, GenerateRequest, Prompt, Row, Task
from rillflow.weights.models import load_policy_model, pick_device


class Logged(EmbeddedEngine):
    """Writes down what it was given and what it sampled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: list[tuple[list[int], list[int]]] = []

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        sampled: list[int] = []
        self.log.append((request.tokens, sampled))
        stream = super().generate(request)

        async def logged() -> AsyncIterator[Chunk]:
            async for chunk in stream:
                sampled.extend(chunk.tokens)
                yield chunk

        return logged()


async def play_episodes(engine: Logged, sampling: SamplingConfig, count: int) -> list[Sample]:
    gateway = Gateway("token", {"agent": Policy(engine, Renderer.load("tiny"))}, {"agent": sampling})
    url = await gateway.start()
    client = openai.AsyncOpenAI(api_key="unset", base_url=url, http_client=openai.DefaultAioHttpClient())

    async def episode(index: int, row: dict[str, Any]) -> list[Sample]:
        task = Task(id=f"t.{index}", prompt=Prompt(**row), group="t", place=index, lane="train", seed=index)
        key = gateway.sessions.open(task.id, seed=task.seed, group="t", deadline_seconds=60)
        running = RunningEpisode(
            task, client=client, policies=["agent"], base_url=session_url(url, task.id), api_key=key,
            clock=SystemClock(), seconds=60,
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


def as_batch(samples: list[Sample]) -> list[BatchSample]:
    place = Row(unit="u", segment=0, offset=0, length=0)
    return [
        BatchSample(
            id=str(index), row=place, tokens=sample.tokens, trained=sample.trained, reward=0.0, group="t",
            group_mean=0.0, group_std=0.0, group_size=1, staleness=0, truncated=sample.truncated,
        )
        for index, sample in enumerate(samples)
    ]  # fmt: skip


def trained_turns(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """(prompt, sampled) of every run of trained tokens of a sample."""
    tokens, mask = sample.columns["tokens"].tolist(), sample.columns["mask"]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(int)))
    return [(tokens[:start], tokens[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.6), SamplingConfig(top_p=0.9, temperature=1.2)]
)
async def test_what_is_trained_is_what_was_sampled(sampling: SamplingConfig) -> None:
    engine = Logged(load_policy_model("tiny", "fp32", pick_device("cpu")), slots=8, context=160)
    await engine.start()
    samples = await play_episodes(engine, sampling, 16)
    await engine.close()
    assert max(len(trained_turns(sample)) for sample in samples) >= 2, "no episode used the tool"
    assert sorted(turn for sample in samples for turn in trained_turns(sample)) == sorted(engine.log)

    rows = make_rows(as_batch(samples), [sample.columns for sample in samples])
    nothing = np.zeros(len(samples))
    micro = collate(Plan(rows, input_length(rows), nothing, nothing), np.arange(len(samples)), torch.device("cpu"))
    with torch.no_grad():
        new_T, _ = PolicyForward(load_policy_model("tiny", "fp32", pick_device("cpu")))(micro)
    assert (new_T - micro.old_T).abs().max() < 1e-5

"""Episodes of the loop through a real gateway with real tools; what samples says what a test wants it to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from rillflow.agents.agentflow.loop import play
from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.config import SamplingConfig
from rillflow.contracts import SystemClock
from rillflow.examples import tally
from rillflow.gateway import Gateway, Policy, anthropic_url
from rillflow.gateway.trees.record import SessionRecord
from rillflow.rollout.episode import RunningEpisode, Surroundings
from rillflow.types import Chunk, GenerateRequest, Lane, Prompt, Task
from tiny_policy import tiny_renderer

ROW = next(iter(tally.prompts("train", 1, 3)))
PAYLOAD: dict[str, Any] = ROW["payload"]
FIRST, SECOND = (f"{box} {PAYLOAD['item']}" for box in PAYLOAD["boxes"])
COUNTS = [PAYLOAD["stock"][box][PAYLOAD["item"]] for box in PAYLOAD["boxes"]]
TRUTH = str(sum(COUNTS))
PAID = tally.answer(PAYLOAD)
NO, YES = '{"sufficient": false}', '{"sufficient": true}'


def says(action: str, action_input: str, thought: str = "so") -> str:
    return f'{{"thought": "{thought}", "action": "{action}", "action_input": "{action_input}"}}'


class Script:
    """Answers the calls with these texts, one after the other, and keeps the prompts."""

    context = 4096

    def __init__(self, answers: Sequence[str]) -> None:
        self._renderer = tiny_renderer()
        self._answers = list(answers)
        self.prompts: list[str] = []
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0)
        self.requests.append(request)
        self.prompts.append(self._renderer.decode(request.tokens))
        text = self._answers.pop(0)
        ids = [*self._renderer.encode(text), self._renderer.end_token]
        numbers = [-0.5] * len(ids)
        yield Chunk(tokens=ids, logprobs=numbers, raw_logprobs=numbers, version=0, finish="stop")


@dataclass(frozen=True)
class Seen:
    answer: str | None
    record: SessionRecord
    script: Script
    metrics: Mapping[str, float]

    def rewards(self, agent: str = "planner") -> list[float | None]:
        """The rewards of an agent's answers, in their order."""
        return [sample.reward for sample in self.record.samples("planner") if sample.agent == agent]


async def played(*answers: str, lane: Lane = "train", payload: Mapping[str, Any] = PAYLOAD, **options: Any) -> Seen:
    """Play one episode with these answers of the planner; it may end before all of them are used."""
    script = Script(answers)
    gateway = Gateway("token", {"planner": Policy(script, tiny_renderer())}, {"planner": SamplingConfig()})
    url = await gateway.start()
    client = openai.AsyncOpenAI(api_key="unset", base_url=url, http_client=openai.DefaultAioHttpClient(), max_retries=0)
    task = Task(id="t.0", prompt=Prompt(id="p", payload=dict(payload)), group="t", place=0, lane=lane, seed=0)
    key = gateway.sessions.open(task.id, seed=0, group="t", deadline_seconds=60)
    toolbox = OpenToolbox([tool_of(tally.search), tool_of(tally.code)])
    episode = RunningEpisode(
        task, client=client, policies=["planner"], url=anthropic_url(url, task.id), api_key=key,
        clock=SystemClock(), seconds=60, give=gateway.sessions.get(task.id).rewards.give,
        surroundings=Surroundings(options={"structured": False} | options, tools=toolbox),
    )  # fmt: skip
    try:
        answer = await play(episode)
        return Seen(answer, gateway.sessions.close(task.id, keep=True), script, dict(episode.metrics))
    finally:
        await client.close()
        await gateway.stop()

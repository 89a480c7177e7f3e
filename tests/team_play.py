"""An episode with several policies through a real gateway; what each says depends on what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from rillflow.config import SamplingConfig
from rillflow.contracts import SystemClock
from rillflow.gateway import Gateway, Policy, SessionRecord, anthropic_url
from rillflow.rollout.episode import RunningEpisode, Surroundings
from rillflow.rollout.push import check_record, describe
from rillflow.rollout.rewards import RewardRules, rewards_of
from rillflow.types import Chunk, GenerateRequest, Prompt, Row, SampleMeta, Task
from tiny_policy import tiny_renderer, tiny_tokenizer

Say = Callable[[str], Awaitable[str]]


class AskedEngine:
    """A TokenSource: `say` gives the answer to a prompt's text, in the tokens of `tiny`."""

    context = 4096

    def __init__(self, say: Say) -> None:
        self.asked: list[str] = []
        self._say = say
        self._tokenizer: Any = tiny_tokenizer()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        asked = self._tokenizer.decode(request.tokens)
        self.asked.append(asked)
        tokens = [*self._tokenizer.encode(await self._say(asked)), *request.sampling.stop_tokens[:1]]
        even = [-0.5] * len(tokens)
        yield Chunk(tokens=tokens, logprobs=even, raw_logprobs=even, version=0, finish="stop")


@dataclass(frozen=True)
class TeamPlayed:
    """`rewards` are those that the ledger gets for each policy, in the recipe's order; `samples` are trained on."""

    rewards: dict[str, float]
    samples: list[SampleMeta]
    asked: Mapping[str, list[str]]
    metrics: Mapping[str, float]
    record: SessionRecord

    @property
    def reward(self) -> float:
        """The task's: what curves and evaluations show."""
        return next(iter(self.rewards.values()))

    def of(self, agent: str) -> list[float]:
        """The rewards of an agent's samples, by turn."""
        return [one.reward for one in sorted(self.samples, key=lambda one: one.turn) if one.agent == agent]


async def play_team(
    play: Callable[[Any], Awaitable[Any]],
    payload: dict[str, Any],
    policies: Mapping[str, Say],
    *,
    roles: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    steps: str | None = None,
) -> TeamPlayed:
    """Play, reward and describe an episode as a node does; `steps` is the trainers' `step_rewards`."""
    engines = {name: AskedEngine(say) for name, say in policies.items()}
    served = {name: Policy(engine, tiny_renderer()) for name, engine in engines.items()}
    gateway = Gateway("token", served, {name: SamplingConfig() for name in policies})
    url = await gateway.start()
    client = openai.AsyncOpenAI(api_key="unset", base_url=url, http_client=openai.DefaultAioHttpClient())
    try:
        task = Task(id="t.0", prompt=Prompt("p", payload), group="t", place=0, lane="train", seed=1)
        key = gateway.sessions.open(task.id, seed=1, group="t", deadline_seconds=60)
        episode = RunningEpisode(
            task, client=client, policies=list(policies), url=anthropic_url(url, task.id), api_key=key,
            clock=SystemClock(), seconds=60, give=gateway.sessions.get(task.id).rewards.give,
            surroundings=Surroundings(roles=roles or {}, options=options or {}),
        )  # fmt: skip
        answer = await play(episode)
        record = gateway.sessions.close(task.id)
    finally:
        await client.close()
        await gateway.stop()
    rewards = rewards_of(answer, list(policies), answer_is_reward=True)
    rules = RewardRules(steps=dict.fromkeys(policies, steps))
    check_record(record, rewards, answer_is_reward=True, rules=rules)
    asked = {name: engine.asked for name, engine in engines.items()}
    return TeamPlayed(rewards, _described(record, rewards), asked, episode.metrics, record)


def _described(record: SessionRecord, rewards: Mapping[str, float]) -> list[SampleMeta]:
    nowhere = Row(unit="u", segment=0, offset=0, length=0)
    return [describe(sample, nowhere, rewards[policy]) for policy in record.trees for sample in record.samples(policy)]


def in_turn(texts: Sequence[str]) -> Say:
    """Says these texts, whatever it is asked."""
    left = iter(texts)

    async def say(asked: str) -> str:
        return next(left)

    return say

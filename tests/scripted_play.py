"""An episode of any workflow through a real gateway, with a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from rillflow.config import SamplingConfig
from rillflow.contracts import SystemClock
from rillflow.gateway import Gateway, Policy, anthropic_url
from rillflow.gateway.trees.record import Sample
from rillflow.rollout.episode import RunningEpisode, Surroundings
from rillflow.types import Chunk, GenerateRequest, Prompt, Task
from tiny_policy import tiny_renderer, tiny_tokenizer


class SayingEngine:
    """A TokenSource: each request gets the next text, in the tokens of `tiny`, a token at a time.

    `said` are the tokens that were handed out, `asked` the prompts as text.
    """

    context = 4096

    def __init__(self, texts: Sequence[str]) -> None:
        self.tokenizer: Any = tiny_tokenizer()
        self.said: list[list[int]] = []
        self.asked: list[str] = []
        self._texts = iter(texts)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.asked.append(self.tokenizer.decode(request.tokens))
        tokens = [*self.tokenizer.encode(next(self._texts)), self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        self.said.append([])
        for token in tokens:
            self.said[-1].append(token)
            finish = "stop" if token in request.sampling.stop_tokens else None
            yield Chunk(tokens=[token], logprobs=[-0.5], raw_logprobs=[-0.5], version=0, finish=finish)


@dataclass(frozen=True)
class PlayedEpisode:
    answer: Any
    samples: list[Sample]
    engine: SayingEngine

    def trained(self) -> list[list[str]]:
        """The trained texts of each sample, one for each unbroken stretch."""
        return [list(_stretches(sample, self.engine.tokenizer)) for sample in self.samples]


async def play_scripted(
    play: Callable[[Any], Awaitable[Any]], payload: dict[str, Any], texts: Sequence[str], surroundings: Surroundings
) -> PlayedEpisode:
    engine = SayingEngine(texts)
    gateway = Gateway("token", {"agent": Policy(engine, tiny_renderer())}, {"agent": SamplingConfig()})
    url = await gateway.start()
    client = openai.AsyncOpenAI(api_key="unset", base_url=url, http_client=openai.DefaultAioHttpClient())
    try:
        task = Task(id="t.0", prompt=Prompt("p", payload), group="t", place=0, lane="train", seed=1)
        key = gateway.sessions.open(task.id, seed=1, group="t", deadline_seconds=60)
        episode = RunningEpisode(
            task, client=client, policies=["agent"], url=anthropic_url(url, task.id), api_key=key,
            clock=SystemClock(), seconds=60, give=gateway.sessions.get(task.id).rewards.give,
            surroundings=surroundings,
        )  # fmt: skip
        answer = await play(episode)
        return PlayedEpisode(answer, gateway.sessions.close(task.id).samples("agent"), engine)
    finally:
        await client.close()
        await gateway.stop()


def _stretches(sample: Sample, tokenizer: Any) -> Any:
    stretch: list[int] = []
    for token, trains in zip(sample.columns["tokens"].tolist(), sample.columns["mask"].tolist(), strict=True):
        if trains:
            stretch.append(token)
        elif stretch:
            yield tokenizer.decode(stretch)
            stretch = []
    if stretch:
        yield tokenizer.decode(stretch)

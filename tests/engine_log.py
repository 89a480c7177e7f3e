"""An engine that writes down what it was given and what it sampled, and how samples are compared with that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np

from rillflow.engine.embedded import EmbeddedEngine
from rillflow.gateway.trees.record import Sample
from rillflow.types import Chunk, GenerateRequest


class Turn(NamedTuple):
    """The prompts of an engine, and the tokens that it sampled, with the log-prob and version of each."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[int]


class LoggedEngine(EmbeddedEngine):
    """The embedded engine; `log` has a turn for every request, in the order in which they came."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: list[Turn] = []

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        turn = Turn(request.tokens, [], [], [])
        self.log.append(turn)
        stream = super().generate(request)

        async def logged() -> AsyncIterator[Chunk]:
            async for chunk in stream:
                turn.sampled.extend(chunk.tokens)
                turn.logprobs.extend(chunk.logprobs)
                turn.versions.extend([chunk.version] * len(chunk.tokens))
                yield chunk

        return logged()


def trained_turns(sample: Sample) -> list[Turn]:
    """The turns of a sample that are trained: each run of trained tokens, behind all that came before it."""
    tokens, mask, logprobs, versions = (sample.columns[name] for name in ("tokens", "mask", "logprobs", "versions"))
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(int)))
    return [
        Turn(tokens[:start].tolist(), *(column[start:end].tolist() for column in (tokens, logprobs, versions)))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]

"""An engine whose tokens are known beforehand: each depends on the seed and on its place alone, as real draws do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rillflow.contracts import Patch
from rillflow.errors import ContextOverflow, EngineLost, QueueFull
from rillflow.types import Chunk, EngineStats, FinishReason, GenerateRequest, Probe, Sampling

VOCABULARY = 1000


def token_at(seed: int, place: int) -> int:
    return (seed * 7919 + place * 104729) % VOCABULARY


def request(
    name: str = "r", prompt: int = 5, count: int = 20, seed: int | None = 3, group: str = ""
) -> GenerateRequest:
    sampling = Sampling(max_tokens=count, seed=seed)
    return GenerateRequest(id=name, tokens=list(range(prompt)), sampling=sampling, group=group)


def expected(asked: GenerateRequest) -> list[int]:
    """Return the whole answer of one undisturbed engine."""
    start, seed = len(asked.tokens), asked.sampling.seed
    assert seed is not None
    return [token_at(seed, start + index) for index in range(asked.sampling.max_tokens)]


class CountingEngine:
    """A `contracts.Engine`. With `hand_out`, it samples only as many tokens as it is given."""

    def __init__(
        self, *, version: int = 0, slots: int = 4, queue: int = 100, context: int = 4096, hand_out: bool = False
    ):
        self.version = version
        self.proven = True
        self.context = context
        self.requests: list[GenerateRequest] = []
        self.logged: list[tuple[str, int]] = []
        self.open = 0
        self.pauses = 0
        self._slots, self._queue = slots, queue
        self._paused, self._broken, self._closed = False, False, False
        self._allowance: int | None = 0 if hand_out else None
        self._turn = asyncio.Event()

    async def start(self) -> None: ...

    async def close(self) -> None:
        self._closed = True
        self._wake()

    async def pause(self) -> None:
        self.pauses += 1
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    def doubt(self) -> None:
        """It samples no weights that could be wrong."""

    async def prove(self, probe: Probe | None) -> None: ...

    async def load(self, tensors: Mapping[str, Any], version: int, probe: Probe | None = None) -> None:
        self.version = version

    async def patch(self, patch: Patch, version: int, probe: Probe | None = None) -> None:
        self.version = version

    def stats(self) -> EngineStats:
        running = min(self.open, self._slots)
        return EngineStats(
            version=self.version, running=running, waiting=self.open - running, slots=self._slots,
            generated_tokens=len(self.logged), prefilled_tokens=0, reused_tokens=0, steps=0, loads=0,
        )  # fmt: skip

    def give(self, tokens: int) -> None:
        assert self._allowance is not None
        self._allowance += tokens
        self._wake()

    def break_down(self) -> None:
        """Lose all that runs now; later requests are served again."""
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    def generate(self, asked: GenerateRequest) -> AsyncIterator[Chunk]:
        if self._closed:
            raise EngineLost("closed")
        if len(asked.tokens) >= self.context:
            raise ContextOverflow("too long")
        if self.open >= self._slots + self._queue:
            raise QueueFull("full")
        self._broken = False
        self.requests.append(asked)
        self.open += 1
        return self._sample(asked)

    async def _sample(self, asked: GenerateRequest) -> AsyncIterator[Chunk]:
        try:
            for index in range(asked.sampling.max_tokens):
                while self._paused or self._broken or self._closed or self._allowance == 0:
                    if self._broken or self._closed:
                        raise EngineLost("broken")
                    await self._turn.wait()
                if self._allowance is not None:
                    self._allowance -= 1
                await asyncio.sleep(0)
                yield self._one(asked, index)
        finally:
            self.open -= 1

    def _one(self, asked: GenerateRequest, index: int) -> Chunk:
        token = token_at(asked.sampling.seed or 0, len(asked.tokens) + index)
        self.logged.append((asked.id, token))
        finish: FinishReason | None = None
        if token in asked.sampling.stop_tokens:
            finish = "stop"
        elif index + 1 == asked.sampling.max_tokens:
            finish = "length"
        return Chunk(tokens=[token], logprobs=[-1.0], raw_logprobs=[-1.0], version=self.version, finish=finish)


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for is a state, not an event
            await asyncio.sleep(0.001)

"""A server engine without a server: its tokens are known beforehand, and it samples only as many as it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from rillflow.config.policy import EngineConfig
from rillflow.engine.servers import ModelFacts, Part, ServerEngine, Tainted, Update
from rillflow.errors import EngineLost, WeightsError
from rillflow.types import GenerateRequest

VOCABULARY = 1000
STALLED, GIVEN_UP = 13, 14  # seeds of requests that the server is silent to, and that it cuts unasked


def token_at(place: int) -> int:
    return (place * 104729 + 11) % VOCABULARY


class FakeUpdate(Update):
    def __init__(self, server: FakeServer, outcome: str) -> None:
        self._server = server
        self._outcome = outcome
        self.closed = False

    async def get_ready(self) -> None:
        self._server.get_ready()

    async def apply(self) -> None:
        keeps = self._server.keeps
        assert keeps or self._server.running == 0, "weights are changed while tokens are sampled"
        self._server.log.append("apply")
        self._server.holds = self._server.announced
        if self._outcome == "wrong":
            raise Tainted("other weights than published")
        if self._outcome == "unfit":
            raise WeightsError("does not fit")
        if self._outcome == "silent":
            raise EngineLost("no answer")
        if self._outcome == "slow":
            await asyncio.sleep(600)

    async def close(self) -> None:
        self.closed = True


class FakeServer(ServerEngine):
    def __init__(self, *, deaf: bool = False, start: Callable[[], None] = lambda: None, **settings: Any) -> None:
        facts = ModelFacts(folder=None, dtype="fp32", vocabulary=VOCABULARY, shapes={}, aliases={})  # type: ignore[arg-type]
        super().__init__(facts, EngineConfig(kind="vllm", **({"slots": 4, "context": 128, "queue": 8} | settings)))
        self.log: list[str] = []
        self.get_ready: Callable[[], None] = lambda: None
        self.sleeps: bool | None = True
        self.oversleeps = False
        self.asked: list[tuple[int, GenerateRequest]] = []
        self.running = 0
        self.logprob = -1.0  # of every token of a prompt
        self.raw = [-2.0]  # of every token of an answer
        self.scored = asyncio.Event()
        self.scored.set()
        self.updates: list[FakeUpdate] = []
        self.announced = self.holds = 0  # versions
        self._deaf = deaf
        self._start = start
        self._allowance = 0
        self._cutting = False
        self._turn = asyncio.Event()
        self._gone = asyncio.get_running_loop().create_future()

    def give(self, tokens: int) -> None:
        self._allowance += tokens
        self._wake()

    def die(self) -> None:
        self._gone.set_result("killed")
        self._wake()

    def _wake(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    async def bring_up(self) -> None:
        self.log.append("up")
        self._start()
        self._gone = asyncio.get_running_loop().create_future()

    async def sleep(self) -> bool:
        assert self.running == 0, "memory is given back while tokens are sampled"
        self.log.append("sleep")
        if self.sleeps is None:
            raise EngineLost("no answer")
        return self.sleeps

    async def wake(self) -> None:
        self.log.append("wake")
        if self.oversleeps:
            raise EngineLost("no answer")

    async def lost(self) -> str:
        reason: str = await asyncio.shield(self._gone)
        return reason

    async def tear_down(self) -> None:
        self.log.append("down")

    async def sample(self, request: GenerateRequest, version: int) -> AsyncGenerator[Part]:
        self.asked.append((version, request))
        if request.sampling.seed == STALLED:
            raise TimeoutError
        if request.sampling.seed == GIVEN_UP:
            await asyncio.sleep(0)
            yield Part([], [], [], "abort")
            return
        self.running += 1
        try:
            place, count = len(request.tokens), request.sampling.max_tokens
            for number in range(count):
                while not self._allowance or self._gone.done():
                    if self._gone.done():
                        raise EngineLost("gone")
                    if self._cutting and not self._deaf:
                        yield Part([], [], [], "abort")
                        return
                    await self._turn.wait()
                self._allowance -= 1
                last = number == count - 1
                versions = [self.holds] if self.keeps else []
                yield Part([token_at(place + number)], [-1.0], self.raw, "length" if last else None, b"", versions)
        finally:
            self.running -= 1

    async def announce(self, version: int) -> None:
        self.announced = version

    async def cut(self) -> None:
        self.log.append("cut")
        self._cutting = True
        self._wake()

    async def go_on(self) -> None:
        self.log.append("go on")
        self._cutting = False
        self._wake()

    async def scores(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[float]]:
        assert not self._cutting, "the server was told to sample nothing"
        self.log.append("score")
        await self.scored.wait()
        return [[self.logprob] * (len(prompt) - 1) for prompt in prompts]

    async def prepare_load(self, tensors: Any) -> Update:
        self.updates.append(FakeUpdate(self, tensors.get("outcome", "")))
        return self.updates[-1]

    async def prepare_patch(self, patch: Any) -> Update:
        self.updates.append(FakeUpdate(self, ""))
        return self.updates[-1]

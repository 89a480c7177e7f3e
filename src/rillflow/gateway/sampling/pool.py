"""One policy's engines as one: a call is one unbroken stream of chunks, whatever happens to the engines.

Invariants: the tokens that a caller gets are those of one draw, each once and in order. When an engine is lost, or
sends a call away, the call goes on elsewhere from prompt and produced ids, with what is left of its length and the same
seed: an engine's draw depends on seed and position, so it is the same draw. The first chunk after says why (`seam`). A
call that no engine can take waits, and `waiting` says for what; the deadline of its session ends it. Versions within a
group do not go back when its calls change engines.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from rillflow.engine.progress import Progress
from rillflow.errors import ContextOverflow, EngineLost, QueueFull, Unavailable
from rillflow.gateway.sampling.fleet import Fleet, Member
from rillflow.types import Chunk, GenerateRequest

_LOOK_SECONDS = 0.25  # between two looks at the engines while a call waits; news wakes it before
_TRIES = 8  # on engines that were lost, in a row without one token
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_GROUPS = 16384  # whose last version is remembered


class EnginePool:
    """A `contracts.TokenSource` over the engines of a fleet."""

    def __init__(self, policy: str, fleet: Fleet, *, context: int, jitter: random.Random | None = None) -> None:
        self.policy = policy
        self.fleet = fleet
        self._context = context
        self._random = jitter or random.Random()
        self._floors: OrderedDict[str, int] = OrderedDict()
        self._waiting = 0

    @property
    def context(self) -> int:
        return self._context

    def waiting(self) -> list[str]:
        """What calls wait for, in words."""
        if not self._waiting:
            return []
        return [f"{self._waiting} calls of {self.policy} wait for an engine: {self.fleet.why_not(self.policy)}"]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        if request.sampling.seed is None:  # drawn once, so that a continuation is the same draw
            sampling = msgspec.structs.replace(request.sampling, seed=self._random.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        progress = Progress(request, self._context)
        full: set[str] = set()
        version = -1
        while (finish := progress.over()) is None:
            member = await self._choose(request, progress, full, version)
            try:
                async with aclosing(self._on(member, request, progress)) as chunks:
                    async for chunk in chunks:
                        version = chunk.version
                        yield chunk
                        if chunk.finish is not None:
                            return
                full.clear()
            except QueueFull:
                full.add(member.engine.name)
            except EngineLost as error:
                await self._cut(member, progress, "engine_lost", error)
            except ContextOverflow:
                if not progress.produced:
                    raise
                finish = "length"
                break
        yield Chunk(tokens=[], logprobs=[], raw_logprobs=[], version=version, finish=finish)

    async def _on(self, member: Member, request: GenerateRequest, progress: Progress) -> AsyncGenerator[Chunk]:
        """What one engine samples of the call; it returns where the engine has sent the call away."""
        floor = self._floors.get(request.group, -1)
        member.calls += 1
        try:
            async with aclosing(member.engine.generate(self.policy, progress.rest(), floor)) as chunks:
                async for chunk in chunks:
                    if chunk.tokens:
                        self._note(request.group, chunk.version, floor)
                    if chunk.finish == "abort":
                        if chunk.tokens:
                            yield progress.take(msgspec.structs.replace(chunk, finish=None))
                        await self._cut(member, progress, (not chunk.tokens and chunk.seam) or "preempted", None)
                        return
                    yield progress.take(chunk)
            raise EngineLost(f"engine {member.engine.name} ended an answer without saying how")
        finally:
            member.calls -= 1

    async def _cut(self, member: Member, progress: Progress, cause: str, error: EngineLost | None) -> None:
        """The call goes on elsewhere: at once, and after a pause where that has brought nothing before."""
        self.fleet.doubt(member)
        progress.cause = cause
        progress.cuts += 1
        progress.losses += error is not None
        if error is not None and progress.losses >= _TRIES:
            raise Unavailable(
                f"no engine could sample this answer, tried {_TRIES} times: {error.message}", error.hint
            ) from error
        if progress.cuts > 1:
            pause = min(_FIRST_PAUSE * 2 ** min(progress.cuts - 2, 16), _LONGEST_PAUSE)
            await asyncio.sleep(pause * (0.5 + self._random.random()))

    async def _choose(self, request: GenerateRequest, progress: Progress, full: set[str], version: int) -> Member:
        """The engine for what is left of the call; waits until there is one. QueueFull when all that are there refused
        a call that has not begun: one that has begun waits for its turn."""
        key = request.group or request.id
        while True:
            floor = max(version, self._floors.get(request.group, -1))
            member = self.fleet.pick(self.policy, key, floor, full)
            if member is not None:
                return member
            if full and not progress.produced and self.fleet.ready(self.policy):
                raise QueueFull(f"all engines of {self.policy} are full", "ask again later or add an engine")
            full.clear()
            self._waiting += 1
            try:
                await self.fleet.news(_LOOK_SECONDS)
            finally:
                self._waiting -= 1

    def _note(self, group: str, version: int, floor: int) -> None:
        """Remember how far a group's versions are; one below the floor says that the line of weights went back."""
        floors = self._floors
        floors[group] = version if version < floor else max(version, floors.get(group, -1))
        floors.move_to_end(group)
        if len(floors) > _GROUPS:
            floors.popitem(last=False)

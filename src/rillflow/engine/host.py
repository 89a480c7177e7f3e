"""The engines of one process, one for each policy, and the reasons for which they are held.

Invariants: a hold lasts until it is released or its time is over; engines sample while no reason holds them. A hold
that *moves* ends every running answer between two tokens, with a last chunk that says `abort`: all sampled tokens come
before it, so the caller can go on elsewhere from the ids that it has. Other holds keep the answers open.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rillflow.contracts import Engine
from rillflow.errors import BadRequest, EngineLost
from rillflow.storage.spans import Spans
from rillflow.types import Chunk, EngineInfo, GenerateRequest

HOLD_SECONDS = 10.0  # until a hold expires that is not renewed: its caller may have died
CATCH_UP = 5.0  # seconds that a request waits for the version it must not fall behind
_STOPPING = "stopping"
_UNPROVEN = "weights not proven yet"
_LOOK = 0.02
_DRAIN_SECONDS = 2.0
_FLUSH = 0.05  # seconds for the last chunks of a paused engine to reach their reader


@runtime_checkable
class Frees(Protocol):
    """An engine that can release memory while it is paused. It allocates it again when it resumes, and drops no
    request."""

    async def free(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Hold:
    move: bool
    timer: asyncio.TimerHandle | None = None


class EngineHost:
    """Samples for the pools of this process, or through an EngineService for those of others.

    `on_busy` is called when the host becomes busy (an answer is open, and nothing holds the engines) and when it no
    longer is. `trouble` returns what is wrong with its weights.
    """

    def __init__(self, name: str, engines: Mapping[str, Engine], url: str = "") -> None:
        self.name = name
        self.url = url
        self.engines = dict(engines)
        self.on_busy: Callable[[bool], None] = lambda busy: None
        self.trouble: Callable[[], str] = lambda: ""
        self._holds: dict[str, _Hold] = {}
        self._answers = 0
        self._busy = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._one_at_a_time = asyncio.Lock()
        self._cut: asyncio.Future[None] | None = None
        self._expiring: set[asyncio.Future[EngineInfo]] = set()

    @property
    def known(self) -> EngineInfo:
        stats = [engine.stats() for engine in self.engines.values()]
        return EngineInfo(
            name=self.name,
            url=self.url,
            versions={policy: engine.version for policy, engine in self.engines.items()},
            context=min(engine.context for engine in self.engines.values()),
            slots=sum(one.slots for one in stats),
            running=sum(one.running for one in stats),
            waiting=sum(one.waiting for one in stats),
            paused=", ".join(self._reasons()),
            trouble=self.trouble(),
        )

    def _reasons(self) -> list[str]:
        """Return the reasons for which nothing is sampled now."""
        unproven = not all(engine.proven for engine in self.engines.values())
        return [*self._holds, *([_UNPROVEN] if unproven else [])]

    async def info(self) -> EngineInfo:
        return self.known

    async def start(self) -> None:
        for engine in self.engines.values():
            await engine.start()

    async def close(self) -> None:
        """Move running answers to other engines, then close all engines."""
        await self.drain()
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    async def drain(self) -> None:
        """Move all running answers to other engines, and wait until their readers have the last chunks."""
        await self.hold(_STOPPING, move=True, seconds=math.inf)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self._empty.wait()

    # ------------------------------------------------------------ who may sample

    async def hold(self, reason: str, *, move: bool = False, seconds: float = HOLD_SECONDS) -> EngineInfo:
        """Stop sampling for `reason`; return once no token is being sampled. A second hold renews the first."""
        async with self._one_at_a_time:
            self._forget(reason)
            loop = asyncio.get_running_loop()
            hold = self._holds[reason] = _Hold(move)
            if not math.isinf(seconds):
                hold.timer = loop.call_later(seconds, self._expire, reason, hold)
            await asyncio.gather(*(engine.pause() for engine in self.engines.values()))
            if move and self._cut is not None and not self._cut.done():
                self._cut.set_result(None)
            self._note_busy()
            return self.known

    async def free(self) -> None:
        """Have engines that are held give back the memory that they can, until they sample again."""
        async with self._one_at_a_time:
            if self._holds:
                await asyncio.gather(*(engine.free() for engine in self.engines.values() if isinstance(engine, Frees)))

    async def release(self, reason: str) -> EngineInfo:
        return await self._release(reason)

    async def _release(self, reason: str, only: _Hold | None = None) -> EngineInfo:
        """Release a hold; with `only`, that one and not a later one for the same reason."""
        async with self._one_at_a_time:
            if only in (None, self._holds.get(reason)) and self._forget(reason) and not self._holds:
                await asyncio.gather(*(engine.resume() for engine in self.engines.values()))
                self._note_busy()
            return self.known

    def _forget(self, reason: str) -> bool:
        hold = self._holds.pop(reason, None)
        if hold is not None and hold.timer is not None:
            hold.timer.cancel()
        return hold is not None

    def _expire(self, reason: str, hold: _Hold) -> None:
        task = asyncio.ensure_future(self._release(reason, hold))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    def _note_busy(self) -> None:
        busy = self._answers > 0 and not self._holds
        if busy != self._busy:
            self._busy = busy
            self.on_busy(busy)

    @property
    def _moving(self) -> bool:
        return any(hold.move for hold in self._holds.values())

    @property
    def _why(self) -> str:
        """The seam of an answer that is moved."""
        return "moved" if _STOPPING in self._holds else "preempted"

    # ------------------------------------------------------------ sampling

    async def generate(self, policy: str, request: GenerateRequest, floor: int = -1) -> AsyncGenerator[Chunk]:
        """Sample as `Engine.generate` does, after the version `floor` or some seconds of waiting for it."""
        async with aclosing(self.frames(policy, request, floor)) as frames:
            async for frame in frames:
                if frame is not None:
                    yield frame

    async def frames(
        self, policy: str, request: GenerateRequest, floor: int = -1, idle: float | None = None
    ) -> AsyncGenerator[Chunk | None]:
        """Yield chunks, and None after every `idle` seconds without one."""
        engine = self._engine(policy)
        async with aclosing(_caught_up(engine, floor, idle)) as waits:
            async for _ in waits:
                yield None
        if self._moving:
            yield _moved(engine.version, self._why)
            return
        chunks = engine.generate(request)
        self._answers += 1
        self._empty.clear()
        self._note_busy()
        try:
            async with aclosing(self._read(chunks, idle)) as frames:
                async for frame in frames:
                    yield frame
                    if frame is not None and frame.finish is not None:
                        return
            yield _moved(engine.version, self._why)
        finally:
            self._answers -= 1
            self._note_busy()
            if not self._answers:
                self._empty.set()
            await _close(chunks)

    def _engine(self, policy: str) -> Engine:
        engine = self.engines.get(policy)
        if engine is None:
            raise BadRequest(f"engine {self.name} has no policy {policy!r}", f"one of: {', '.join(self.engines)}")
        return engine

    async def _read(self, chunks: AsyncIterator[Chunk], idle: float | None) -> AsyncGenerator[Chunk | None]:
        """Yield the chunks of an answer until it is moved. A stream that ends without a finish was lost."""
        if self._cut is None or self._cut.done():
            self._cut = asyncio.get_running_loop().create_future()
        cut = self._cut
        while True:
            following = asyncio.ensure_future(_next(chunks))
            try:
                while not await _arrives(following, cut, idle):
                    if cut.done():
                        return
                    yield None
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
            yield following.result()


def tell_busy(host: EngineHost, spans: Spans) -> None:
    """Record the span `rollout` of this worker while at least one sequence is sampled."""
    host.on_busy = lambda busy: (spans.begin if busy else spans.end)("rollout")


async def _arrives(following: asyncio.Future[Chunk], cut: asyncio.Future[None], idle: float | None) -> bool:
    either: set[asyncio.Future[Any]] = {following, cut}
    await asyncio.wait(either, timeout=idle, return_when=asyncio.FIRST_COMPLETED)
    if cut.done() and not following.done():
        await asyncio.wait({following}, timeout=_FLUSH)
    return following.done()


async def _caught_up(engine: Engine, floor: int, idle: float | None) -> AsyncGenerator[None]:
    """Wait for a version, some seconds at most: the lineage may have gone back, so that it never comes."""
    loop = asyncio.get_running_loop()
    now = told = loop.time()
    end = now + CATCH_UP
    while engine.version < floor and now < end:
        await asyncio.sleep(_LOOK)
        now = loop.time()
        if idle is not None and now - told >= idle:
            told = now
            yield None


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk:
    try:
        return await anext(chunks)
    except StopAsyncIteration:
        raise EngineLost("the engine ended an answer without saying how") from None


async def _close(chunks: AsyncIterator[Chunk]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


def _moved(version: int, why: str) -> Chunk:
    return Chunk(tokens=[], logprobs=[], raw_logprobs=[], version=version, finish="abort", seam=why)

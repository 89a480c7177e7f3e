"""The engines that a node samples on, and one unbroken stream of chunks for each call, whatever happens to them.

Invariants of the fleet: a call never goes to an engine that is lost or held. A lost engine is asked for its state until
it answers, or until the roster no longer lists it. An engine that returns at another address replaces the old one.

Invariants of a pool: the tokens that a caller gets are those of one draw, each once and in order. When an engine is
lost, or sends a call away, another engine continues the call from the prompt and the produced ids, with the remaining
length and the same seed. An engine's draw depends on seed and position, so it is the same draw. The first chunk after
the change names its cause (`seam`). A call that no engine can take waits, and `waiting` says for what; the deadline of
its session ends it. Versions within a group do not go back when its calls change engines.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from rillflow.engine.remote import RemoteEngine
from rillflow.engine.requests import Progress
from rillflow.errors import ContextOverflow, EngineLost, QueueFull, RillflowError, Unavailable
from rillflow.types import Chunk, EngineInfo, GenerateRequest

PROBE_EVERY = 0.25
# A call leaves its preferred engine, which may still have its prefix cached, when that engine has more work than slots
# and another one has this much less work for each of its slots.
_SLACK = 0.5
_WAIT_SECONDS = 0.25  # between two attempts to find an engine for a waiting call; a notification ends the wait early
_TRIES = 8  # on engines that were lost, in a row without one token
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_GROUPS = 16384  # whose last version is remembered


class PoolEngine(Protocol):
    """An engine process, or the engine of this process: `RemoteEngine` and `EngineHost`.

    `known` is the last known state of the engine.
    """

    @property
    def name(self) -> str: ...

    @property
    def known(self) -> EngineInfo: ...

    def generate(self, policy: str, request: GenerateRequest, floor: int = -1) -> AsyncGenerator[Chunk]:
        """Raises EngineLost when the engine is gone. A chunk with the finish `abort` sends the call elsewhere."""

    async def info(self) -> EngineInfo: ...

    async def hold(self, reason: str, *, move: bool = False, seconds: float = 10.0) -> EngineInfo: ...

    async def release(self, reason: str) -> EngineInfo: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """One engine, with the number of calls of this process on it. `missed`: the roster does not list it."""

    engine: PoolEngine
    up: bool = True
    missed: bool = False
    calls: int = 0

    @property
    def load(self) -> float:
        """The work for each slot, from this process and from others."""
        known = self.engine.known
        return max(self.calls, known.running + known.waiting) / max(1, known.slots)

    def serves(self, policy: str) -> bool:
        versions = self.engine.known.versions
        return self.up and (policy in versions or not versions)


class Fleet:
    """All engines of a node. The pools of its policies share it."""

    def __init__(self, engines: Iterable[PoolEngine] = ()) -> None:
        self.members: dict[str, Member] = {}
        self._changed = asyncio.Event()
        self._reviving: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        for engine in engines:
            self.add(engine)

    # ------------------------------------------------------------ members

    def add(self, engine: PoolEngine) -> None:
        self.remove(engine.name)
        self.members[engine.name] = Member(engine)
        self.notify()

    def remove(self, name: str) -> None:
        """Close an engine. Its calls continue at others."""
        member = self.members.pop(name, None)
        if member is not None:
            member.up = False
            task = asyncio.create_task(member.engine.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def follow(self, roster: Iterable[EngineInfo], open: Callable[[EngineInfo], RemoteEngine]) -> None:
        """Take over the run's roster. It may lack an engine that lives, so only lost engines are removed with it."""
        infos = {info.name: info for info in roster}
        for info in infos.values():
            member = self.members.get(info.name)
            if member is None or member.engine.known.url != info.url:
                self.add(open(info))
            elif isinstance(member.engine, RemoteEngine):
                member.engine.hear(info)
        for name, member in list(self.members.items()):
            # The engine of this process is never in the roster.
            member.missed = name not in infos and isinstance(member.engine, RemoteEngine)
            if member.missed and not member.up:
                self.remove(name)
        self._start_probes()
        self.notify()

    def doubt(self, member: Member) -> None:
        """Send no call to an engine, which is lost or sends calls away, until it has reported its state."""
        member.up = False
        self._start_probes()

    def _start_probes(self) -> None:
        if self._doubtful() and (self._reviving is None or self._reviving.done()):
            self._reviving = asyncio.create_task(self._revive(), name="probe-engines")

    def _doubtful(self) -> list[Member]:
        return [member for member in self.members.values() if not member.up or member.missed]

    async def _revive(self) -> None:
        while doubtful := self._doubtful():
            await asyncio.gather(*map(self._probe, doubtful))
            await asyncio.sleep(PROBE_EVERY)

    async def _probe(self, member: Member) -> None:
        try:
            await member.engine.info()
        except RillflowError:
            member.up = False
        else:
            member.up = True
            self.notify()

    async def close(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        for name in list(self.members):
            self.remove(name)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ------------------------------------------------------------ notifications

    def notify(self) -> None:
        """Wake waiting calls: an engine may be available to them now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float) -> None:
        """Wait for the next `notify`, for at most `seconds`."""
        with suppress(TimeoutError):
            # Not `wait_for`: in Python 3.11 an event that is set together with a cancellation would hide it.
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # ------------------------------------------------------------ choosing

    def ready(self, policy: str) -> list[Member]:
        return [m for m in self.members.values() if m.serves(policy) and not m.engine.known.paused]

    def pick(self, policy: str, key: str, floor: int, avoid: Collection[str] = ()) -> Member | None:
        """Return the engine for a call: the preferred one of its `key` while that keeps up, else the least loaded.

        Engines that serve `floor` or a later version come first. The result is None if no engine is ready.
        """
        ready = [member for member in self.ready(policy) if member.engine.name not in avoid]
        ready = [m for m in ready if m.engine.known.versions.get(policy, floor) >= floor] or ready
        if len(ready) < 2:
            return ready[0] if ready else None
        preferred = max(ready, key=lambda member: xxh3_64_intdigest(f"{key}/{member.engine.name}".encode()))
        least = min(ready, key=lambda member: member.load)
        return preferred if preferred.load <= max(1.0, least.load + _SLACK) else least

    def why_not(self, policy: str) -> str:
        """Say why no engine can take a call of the policy now."""
        states = []
        for name, member in sorted(self.members.items()):
            if not member.up:
                states.append(f"{name} does not answer")
            elif not member.serves(policy):
                states.append(f"{name} does not serve it")
            elif member.engine.known.paused:
                states.append(f"{name} is held ({member.engine.known.paused})")
            else:
                states.append(f"{name} is full")
        return "; ".join(states) or "no engine has registered"

    def version(self, policy: str) -> int | None:
        """Return the lowest version that the next call may be sampled with; None without engines."""
        members = self.ready(policy) or [member for member in self.members.values() if member.serves(policy)]
        known = [m.engine.known.versions for m in members]
        return min((versions[policy] for versions in known if policy in versions), default=None)

    def versions(self, policies: Iterable[str]) -> dict[str, int] | None:
        """Return the `version` of each policy, or None while one of them has no engine."""
        found: dict[str, int] = {}
        for policy in policies:
            version = self.version(policy)
            if version is None:
                return None
            found[policy] = version
        return found


class EnginePool:
    """A `contracts.TokenSource` over the engines of a fleet, for one policy."""

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
        """Return what calls are waiting for, in words."""
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
        """Yield what one engine samples of the call. The generator ends if the engine sends the call away."""
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
            raise EngineLost(f"engine {member.engine.name} ended an answer without a finish reason")
        finally:
            member.calls -= 1

    async def _cut(self, member: Member, progress: Progress, cause: str, error: EngineLost | None) -> None:
        """Let another engine continue the call: at once the first time, after a growing pause from then on."""
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
        """Return the engine for the rest of the call; wait until one is ready.

        Raises QueueFull if all ready engines refused a call that has not begun. A call that has begun waits.
        """
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
                await self.fleet.changed(_WAIT_SECONDS)
            finally:
                self._waiting -= 1

    def _note(self, group: str, version: int, floor: int) -> None:
        """Record the newest version of a group. A version below the floor means that the lineage went back."""
        floors = self._floors
        floors[group] = version if version < floor else max(version, floors.get(group, -1))
        floors.move_to_end(group)
        if len(floors) > _GROUPS:
            floors.popitem(last=False)

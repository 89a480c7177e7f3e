"""The engines that a node samples on: who is there, who is lost, who may sample, and which one a call goes to.

Invariants: a call never goes to an engine that is lost or held. A lost engine is asked again and again until it
answers, or until the roster knows it no more; an engine that comes back at another address takes the place of the old.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from rillflow.engine.remote import RemoteEngine
from rillflow.errors import RillflowError
from rillflow.types import Chunk, EngineInfo, GenerateRequest

PROBE_EVERY = 0.25
# A call leaves its favourite engine, which may still have its prefix, when that has work for more than all its slots
# and another one has so much less, in its own slots.
_SLACK = 0.5


class PoolEngine(Protocol):
    """An engine process, or this process's own: `EngineHost` and `RemoteEngine`. `known` is what is known of it now."""

    @property
    def name(self) -> str: ...

    @property
    def known(self) -> EngineInfo: ...

    def generate(self, policy: str, request: GenerateRequest, floor: int = -1) -> AsyncGenerator[Chunk]:
        """Raises EngineLost when the engine has gone; a chunk that ends with `abort` asks to go on elsewhere."""

    async def info(self) -> EngineInfo: ...

    async def hold(self, reason: str, *, move: bool = False, seconds: float = 10.0) -> EngineInfo: ...

    async def release(self, reason: str) -> EngineInfo: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """One engine, and how many calls of this process are at work on it. `missed`: the roster knows it no more."""

    engine: PoolEngine
    up: bool = True
    missed: bool = False
    calls: int = 0

    @property
    def load(self) -> float:
        """Work for each slot, of this process and of others."""
        known = self.engine.known
        return max(self.calls, known.running + known.waiting) / max(1, known.slots)

    def serves(self, policy: str) -> bool:
        versions = self.engine.known.versions
        return self.up and (policy in versions or not versions)


class Fleet:
    """All engines of a node, shared by the pools of its policies."""

    def __init__(self, engines: Iterable[PoolEngine] = ()) -> None:
        self.members: dict[str, Member] = {}
        self._news = asyncio.Event()
        self._reviving: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        for engine in engines:
            self.add(engine)

    # ------------------------------------------------------------ who is there

    def add(self, engine: PoolEngine) -> None:
        self.remove(engine.name)
        self.members[engine.name] = Member(engine)
        self.tell()

    def remove(self, name: str) -> None:
        """Its calls go on elsewhere."""
        member = self.members.pop(name, None)
        if member is not None:
            member.up = False
            task = asyncio.create_task(member.engine.close())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def hear(self, roster: Iterable[EngineInfo], open: Callable[[EngineInfo], RemoteEngine]) -> None:
        """What the run's roster says. It may have forgotten an engine that lives: only lost ones go with it."""
        infos = {info.name: info for info in roster}
        for info in infos.values():
            member = self.members.get(info.name)
            if member is None or member.engine.known.url != info.url:
                self.add(open(info))
            elif isinstance(member.engine, RemoteEngine):
                member.engine.hear(info)
        for name, member in list(self.members.items()):
            # The process's own is not in the roster.
            member.missed = name not in infos and isinstance(member.engine, RemoteEngine)
            if member.missed and not member.up:
                self.remove(name)
        self._ask_the_doubtful()
        self.tell()

    def doubt(self, member: Member) -> None:
        """It is lost, or it sends calls away: no call goes there until it has answered how it is."""
        member.up = False
        self._ask_the_doubtful()

    def _ask_the_doubtful(self) -> None:
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
            self.tell()

    async def close(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        for name in list(self.members):
            self.remove(name)
        await asyncio.gather(*self._retiring, return_exceptions=True)

    # ------------------------------------------------------------ news

    def tell(self) -> None:
        """Something may be possible now that was not: those who wait look again."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, seconds: float) -> None:
        """Until something has changed, for so many seconds at most."""
        with suppress(TimeoutError):
            # Not `wait_for`: in Python 3.11 news that come with a cancellation would hide it.
            async with asyncio.timeout(seconds):
                await self._news.wait()

    # ------------------------------------------------------------ choosing

    def ready(self, policy: str) -> list[Member]:
        return [m for m in self.members.values() if m.serves(policy) and not m.engine.known.paused]

    def pick(self, policy: str, key: str, floor: int, avoid: Collection[str] = ()) -> Member | None:
        """The engine for a call: that of its `key` while it keeps up, else the least loaded; None when there is none.

        One that serves `floor` or a later version comes first.
        """
        ready = [member for member in self.ready(policy) if member.engine.name not in avoid]
        ready = [m for m in ready if m.engine.known.versions.get(policy, floor) >= floor] or ready
        if len(ready) < 2:
            return ready[0] if ready else None
        favourite = max(ready, key=lambda member: xxh3_64_intdigest(f"{key}/{member.engine.name}".encode()))
        least = min(ready, key=lambda member: member.load)
        return favourite if favourite.load <= max(1.0, least.load + _SLACK) else least

    def why_not(self, policy: str) -> str:
        """Why no call of the policy can go anywhere at present."""
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
        return "; ".join(states) or "none is there"

    def version(self, policy: str) -> int | None:
        """The lowest that a call may be sampled with now: nothing sampled next is older. None without engines."""
        members = self.ready(policy) or [member for member in self.members.values() if member.serves(policy)]
        known = [m.engine.known.versions for m in members]
        return min((versions[policy] for versions in known if policy in versions), default=None)

    def versions(self, policies: Iterable[str]) -> dict[str, int] | None:
        """Of all policies; None while one of them has no engine."""
        found: dict[str, int] = {}
        for policy in policies:
            version = self.version(policy)
            if version is None:
                return None
            found[policy] = version
        return found

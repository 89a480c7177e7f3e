"""The rollout manager: which engine may sample now. Calls stay open whatever it decides.

    what happens                        interrupts                       resumes
    enough sampled (`PauseConfig`)      all engines, calls held          newer weights, or `at_most` seconds
    new weights                         an engine's own load, which      the load's end
                                        cuts between two tokens
    a tag other than rollout            that engine, calls moved         the tag rollout again
    a resource is lost                  that engine, calls moved         the resource is restored
    somebody asks (`interrupt`)         as asked                         `resume`, or the time asked for

Invariants: an engine samples while nobody has a reason against it. A reason lives at the engine, where those of several
nodes meet, and ends there by itself when the manager that gave it is no longer there to renew it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rillflow.config.agents import PauseConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, RillflowError
from rillflow.gateway.sampling.fleet import Fleet
from rillflow.gateway.sampling.triggers import Threshold

log = logging.getLogger(__name__)

TICK = 0.1
LEASE = 10.0  # seconds that an engine keeps a reason which is not renewed
RENEW = 3.0
ROLLOUT = "rollout"
_THRESHOLD, _TAG, _LOST = "threshold", "tag", "lost"


@dataclass(slots=True)
class Held:
    """One reason against one engine. `versions` are those that it served when it was held."""

    move: bool
    until: float
    versions: dict[str, int]
    renewed: float = -math.inf


class RolloutManager:
    """Interrupts and resumes the engines of a fleet. `name` tells its reasons from those of other managers."""

    def __init__(
        self, fleet: Fleet, *, name: str = "node", pause: PauseConfig | None = None, clock: Clock | None = None
    ) -> None:
        self._fleet = fleet
        self._name = name
        self._clock = clock or SystemClock()
        self._threshold = Threshold(pause, self._clock) if pause else None
        self._held: dict[tuple[str, str], Held] = {}
        self._served: dict[str, dict[str, int]] = {}

    # ------------------------------------------------------------ what happens

    def episode_finished(self) -> None:
        if self._threshold is not None:
            self._threshold.episode_finished()

    async def tag(self, engine: str, active: str) -> None:
        """An engine's resource has another task now, or rolls out again."""
        if active == ROLLOUT:
            await self.resume(_TAG, [engine])
        else:
            await self.interrupt(_TAG, [engine], move=True)

    async def lost(self, engine: str) -> None:
        """An engine's resource is about to go, or has gone."""
        await self.interrupt(_LOST, [engine], move=True)

    async def restored(self, engine: str) -> None:
        await self.resume(_LOST, [engine])

    # ------------------------------------------------------------ reasons

    async def interrupt(
        self, reason: str, engines: Iterable[str] | None = None, *, move: bool = False, seconds: float = math.inf
    ) -> None:
        """Stop engines (all: None) for `reason`. With `move`, running calls go on elsewhere, else they are held."""
        if not reason:
            raise BadRequest("an interruption needs a reason", "say why: it is shown in the status")
        for engine in self._named(engines):
            member = self._fleet.members.get(engine)
            versions = dict(member.engine.known.versions) if member is not None else {}
            self._held[engine, reason] = Held(move, self._clock.monotonic() + seconds, versions)
        log.info("%s: engines stop sampling: %s", self._name, reason)
        await self._renew()

    async def resume(self, reason: str, engines: Iterable[str] | None = None) -> None:
        """The reason is gone; engines that have no other sample again."""
        named = None if engines is None else set(engines)
        gone = [key for key in self._held if key[1] == reason and (named is None or key[0] in named)]
        await asyncio.gather(*(self._release(*key) for key in gone))

    def _named(self, engines: Iterable[str] | None) -> list[str]:
        known = list(self._fleet.members)
        if engines is None:
            return known
        named = list(engines)
        for engine in named:
            if engine not in known:
                raise BadRequest(f"there is no engine {engine!r}", f"one of: {', '.join(known) or 'none is there'}")
        return named

    async def _release(self, engine: str, reason: str) -> None:
        self._held.pop((engine, reason), None)
        member = self._fleet.members.get(engine)
        if member is not None:
            try:
                await member.engine.release(self._said(reason))
            except RillflowError as error:
                log.info("%s: not released, its reasons end by themselves: %s", engine, error.message)
        self._fleet.tell()

    async def _renew(self) -> None:
        """Tell engines again why they must not sample: one that was started anew does not know."""
        now = self._clock.monotonic()
        due = [key for key, held in self._held.items() if now - held.renewed >= RENEW]
        await asyncio.gather(*(self._hold(engine, reason, now) for engine, reason in due))

    async def _hold(self, engine: str, reason: str, now: float) -> None:
        held, member = self._held.get((engine, reason)), self._fleet.members.get(engine)
        if held is None:
            return
        held.renewed = now
        if member is None:
            return
        try:
            await member.engine.hold(self._said(reason), move=held.move, seconds=LEASE)
        except RillflowError as error:
            log.info("%s: not reached, it is told again: %s", engine, error.message)
        if (engine, reason) not in self._held:  # released meanwhile, perhaps before this arrived
            await self._release(engine, reason)

    def _said(self, reason: str) -> str:
        return f"{self._name}: {reason}"

    # ------------------------------------------------------------ the clock

    async def run(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(TICK)

    async def tick(self) -> None:
        """Look at what has changed since the last time."""
        await self._see_weights()
        await self._end_overdue()
        if self._threshold is not None and self._fleet.members and not self._holding(_THRESHOLD):
            why = self._threshold.reached()
            if why:
                log.info("%s: %s", self._name, why)
                await self.interrupt(_THRESHOLD, seconds=self._threshold.bounds.at_most)
        await self._renew()

    async def _see_weights(self) -> None:
        """An engine with other weights than those it was held with samples again."""
        for name, member in list(self._fleet.members.items()):
            versions = member.engine.known.versions
            if self._served.get(name, versions) != versions and self._threshold is not None:
                self._threshold.restart()
            self._served[name] = dict(versions)
            held = self._held.get((name, _THRESHOLD))
            if held is not None and held.versions != versions:
                await self._release(name, _THRESHOLD)

    async def _end_overdue(self) -> None:
        now = self._clock.monotonic()
        for engine, reason in [key for key, held in self._held.items() if now >= held.until]:
            await self._release(engine, reason)
            if reason == _THRESHOLD and self._threshold is not None:
                self._threshold.restart()

    def _holding(self, reason: str) -> bool:
        return any(held == reason for _, held in self._held)

    def state(self) -> dict[str, Any]:
        """For people: every engine, and every reason against one."""
        now = self._clock.monotonic()
        engines = {
            name: {
                "url": member.engine.known.url,
                "up": member.up,
                "versions": member.engine.known.versions,
                "calls": member.calls,
                "paused": member.engine.known.paused,
            }
            for name, member in self._fleet.members.items()
        }
        held = [
            {
                "engine": engine,
                "reason": reason,
                "move": held.move,
                "seconds_left": None if math.isinf(held.until) else round(held.until - now, 3),
            }
            for (engine, reason), held in self._held.items()
        ]
        return {"engines": engines, "held": held}

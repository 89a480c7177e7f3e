"""The rollout manager: which engines of a node may sample now. Calls stay open whatever it decides.

    cause                               held                             until
    enough sampled (`PauseConfig`)      all engines, calls wait          newer weights, or `at_most` seconds
    new weights                         the engine's own load, which     the end of the load
                                        cuts between two tokens
    the node's worker trains            its own engine, calls move       the worker rolls out again
                                        or wait
    an operator (`/engines/hold`)       as requested                     `/engines/release`, or the requested seconds

Invariant: an engine samples while no hold has a reason against it. This is the only mechanism that stops an engine.
The reasons are kept at the engine, because several nodes may share it. A reason at an engine process is a lease: the
manager renews it, and it expires if the manager dies.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from rillflow.config.rollout import PauseConfig
from rillflow.contracts import Clock, SystemClock
from rillflow.engine.remote import RemoteEngine
from rillflow.errors import BadRequest, RillflowError
from rillflow.gateway.engine_pool import Fleet
from rillflow.gateway.shapes import ErrorAnswer
from rillflow.types.base import json_decoder
from rillflow.types.routes import JSON, raw
from rillflow.wire import Service
from rillflow.wire.messages import Request, Response

log = logging.getLogger(__name__)

TICK = 0.1
LEASE = 10.0  # seconds until an engine process drops a reason that is not renewed
RENEW = 3.0
_THRESHOLD = "threshold"
_BODY = 1 << 20
_HOLD = "a hold is identified by its reason"
_ERRORS = (ErrorAnswer,)

Body = TypeVar("Body")
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Names = Annotated[list[str], msgspec.Meta(max_length=1000)]


@dataclass(slots=True)
class Held:
    """One reason against one engine. `versions` are those that the engine served when the hold began."""

    move: bool
    until: float
    versions: dict[str, int]
    renewed: float = -math.inf


class Threshold:
    """Counts what was sampled since the last weights, up to the bounds of `rollout.pause_after`."""

    def __init__(self, bounds: PauseConfig, clock: Clock) -> None:
        self.bounds = bounds
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Count from zero: new weights were loaded, or a pause ended without any."""
        self._episodes = 0
        self._since = self._clock.monotonic()

    def episode_finished(self) -> None:
        self._episodes += 1

    def reached(self) -> str:
        """Return which bound is reached, in words; empty while none is."""
        bounds = self.bounds
        if bounds.episodes is not None and self._episodes >= bounds.episodes:
            return f"{self._episodes} episodes since the last weights"
        if bounds.seconds is not None and self._clock.monotonic() - self._since >= bounds.seconds:
            return f"{bounds.seconds:g} s since the last weights"
        return ""


class RolloutManager:
    """Holds and releases the engines of a fleet. `name` marks its reasons among those of other managers."""

    def __init__(
        self, fleet: Fleet, *, name: str = "node", pause: PauseConfig | None = None, clock: Clock | None = None
    ) -> None:
        self._fleet = fleet
        self._name = name
        self._clock = clock or SystemClock()
        self._threshold = Threshold(pause, self._clock) if pause else None
        self._held: dict[tuple[str, str], Held] = {}
        self._served: dict[str, dict[str, int]] = {}

    def episode_finished(self) -> None:
        """Count an episode for training. Evaluations do not count: the trainer would wait for samples that a paused
        node does not make."""
        if self._threshold is not None:
            self._threshold.episode_finished()

    # ------------------------------------------------------------ reasons

    async def hold(
        self, reason: str, engines: Iterable[str] | None = None, *, move: bool = False, seconds: float = math.inf
    ) -> None:
        """Stop engines (None: all) for `reason`. With `move`, running calls continue at other engines; else they wait.

        Returns once the engines that answered sample no token.
        """
        if not reason:
            raise BadRequest("a hold needs a reason", "say why: the status shows it")
        for engine in self._named(engines):
            member = self._fleet.members.get(engine)
            versions = dict(member.engine.known.versions) if member is not None else {}
            self._held[engine, reason] = Held(move, self._clock.monotonic() + seconds, versions)
        log.info("%s: engines stop sampling: %s", self._name, reason)
        await self._renew()

    async def release(self, reason: str, engines: Iterable[str] | None = None) -> None:
        """Drop `reason` at engines (None: all). An engine without another reason samples again."""
        named = None if engines is None else set(engines)
        gone = [key for key in self._held if key[1] == reason and (named is None or key[0] in named)]
        await asyncio.gather(*(self._drop(*key) for key in gone))

    def _named(self, engines: Iterable[str] | None) -> list[str]:
        known = list(self._fleet.members)
        if engines is None:
            return known
        named = list(engines)
        for engine in named:
            if engine not in known:
                raise BadRequest(f"no engine is called {engine!r}", f"known engines: {', '.join(known) or 'none'}")
        return named

    async def _drop(self, engine: str, reason: str) -> None:
        self._held.pop((engine, reason), None)
        member = self._fleet.members.get(engine)
        if member is not None:
            try:
                await member.engine.release(self._full(reason))
            except RillflowError as error:
                log.info("%s: could not be released, the hold will expire: %s", engine, error.message)
        self._fleet.notify()

    async def _renew(self) -> None:
        """Repeat the holds that are due. An engine that was restarted has lost its reasons."""
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
        # An engine of this process dies with its manager, so its hold needs no lease. Training may block the event
        # loop for longer than a lease lasts.
        seconds = LEASE if isinstance(member.engine, RemoteEngine) else math.inf
        try:
            await member.engine.hold(self._full(reason), move=held.move, seconds=seconds)
        except RillflowError as error:
            log.info("%s: could not be held, trying again: %s", engine, error.message)
        if (engine, reason) not in self._held:  # it was released meanwhile, perhaps before the hold arrived
            await self._drop(engine, reason)

    def _full(self, reason: str) -> str:
        return f"{self._name}: {reason}"

    # ------------------------------------------------------------ the clock

    async def run(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(TICK)

    async def tick(self) -> None:
        """Compare versions, times and counts with the bounds, and renew what is due."""
        await self._compare_weights()
        await self._end_overdue()
        if self._threshold is not None and self._fleet.members and not self._holding(_THRESHOLD):
            why = self._threshold.reached()
            if why:
                log.info("%s: %s", self._name, why)
                await self.hold(_THRESHOLD, seconds=self._threshold.bounds.at_most)
        await self._renew()

    async def _compare_weights(self) -> None:
        """Release engines whose weights have changed since the threshold stopped them."""
        for name, member in list(self._fleet.members.items()):
            versions = member.engine.known.versions
            if self._served.get(name, versions) != versions and self._threshold is not None:
                self._threshold.restart()
            self._served[name] = dict(versions)
            held = self._held.get((name, _THRESHOLD))
            if held is not None and held.versions != versions:
                await self._drop(name, _THRESHOLD)

    async def _end_overdue(self) -> None:
        now = self._clock.monotonic()
        for engine, reason in [key for key, held in self._held.items() if now >= held.until]:
            await self._drop(engine, reason)
            if reason == _THRESHOLD and self._threshold is not None:
                self._threshold.restart()

    def _holding(self, reason: str) -> bool:
        return any(held == reason for _, held in self._held)

    def state(self) -> dict[str, Any]:
        """Return every engine and every reason, for people."""
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


# ---------------------------------------------------------------- routes


class HoldEngines(msgspec.Struct, forbid_unknown_fields=True):
    """Hold engines (default: all) for `seconds` (default: until they are released or this gateway ends)."""

    reason: Reason
    engines: Names | None = None
    move: bool = False
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class ReleaseEngines(msgspec.Struct, forbid_unknown_fields=True):
    """Drop the hold of a reason (default: at all engines)."""

    reason: Reason
    engines: Names | None = None


class EngineControlRoutes:
    """The rollout manager, for operators and the resource manager."""

    hold = raw(
        "POST", "/engines/hold", "operator", summary="Hold engines, or move their calls", body=HoldEngines,
        again=_HOLD, answers={JSON: ()}, errors=_ERRORS,
    )  # fmt: skip
    release = raw(
        "POST", "/engines/release", "operator", summary="Release engines from a hold", body=ReleaseEngines,
        again=_HOLD, answers={JSON: ()}, errors=_ERRORS,
    )  # fmt: skip
    engines = raw(
        "GET", "/engines", "reader", summary="Every engine, and every hold", answers={JSON: ()},
        errors=_ERRORS,
    )  # fmt: skip


def add_engine_routes(service: Service, manager: RolloutManager) -> None:
    """Add the routes that hold engines, release them and show them."""

    async def hold(ask: HoldEngines) -> None:
        seconds = math.inf if ask.seconds is None else ask.seconds
        await manager.hold(ask.reason, ask.engines, move=ask.move, seconds=seconds)

    async def release(ask: ReleaseEngines) -> None:
        await manager.release(ask.reason, ask.engines)

    async def show(request: Request) -> Response:
        return _state(manager)

    service.raw(EngineControlRoutes.hold, _taking(HoldEngines, hold, manager))
    service.raw(EngineControlRoutes.release, _taking(ReleaseEngines, release, manager))
    service.raw(EngineControlRoutes.engines, show)


def _taking(
    kind: type[Body], act: Callable[[Body], Awaitable[None]], manager: RolloutManager
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            ask = json_decoder(kind).decode(await request.read(_BODY))
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise BadRequest(f"{request.path}: {error}", 'send JSON, such as {"reason": "maintenance"}') from error
        await act(ask)
        return _state(manager)

    return endpoint


def _state(manager: RolloutManager) -> Response:
    return Response(msgspec.json.encode(manager.state()), media_type=JSON)

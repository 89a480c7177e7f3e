"""The dataflow service, as nodes, engines, trainers, supervisors and dashboards call it.

Completions that are sent at the same time share one call. Two calls may be under way, so that the peer has work while
the answer to the other is on its way.

An engine announces changes of its weights. `EngineTurn`: an engine has a turn to change its weights, so that not all
engines of a policy pause at once. `FetchWord`: an engine that downloads a whole version announces it, and that version
stays in the store meanwhile. Nothing depends on either. Without an answer, or after `LONGEST` seconds in which others
were first, an engine goes ahead; without an announcement it downloads all the same, and plans again where a file has
gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rillflow.batching import Answer, Batcher, Item
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DeadlineExceeded, RillflowError, from_body
from rillflow.types import (
    Ack,
    AskTurn,
    CompleteTask,
    CompleteTasks,
    Engines,
    LookEngines,
    RunRecipe,
    StopRun,
    TellFetch,
    TurnReply,
    Units,
)
from rillflow.types.routes import Dataflow, Updates
from rillflow.types.runs import ledger_of
from rillflow.wire import Client
from rillflow.wire.client import DEFAULT_DEADLINE, Reads, Sends
from rillflow.wire.connections import within

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- calls that travel together

UNDER_WAY = 2


class Coalesced(Generic[Item, Answer]):
    """`call(items, deadline)` answers each item with its result or with an error of its own, in the same order.

    Belongs to one event loop. The longest of the callers' deadlines is the call's, so that no item is given up before
    its time; no caller waits longer than their own.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item], float], Awaitable[Sequence[Answer | RillflowError]]],
        clock: Clock | None = None,
    ) -> None:
        self._call = call
        self._clock = clock or SystemClock()
        self._batcher = Batcher[tuple[Item, float], Answer](self._send, at_once=UNDER_WAY)

    async def __call__(self, item: Item, deadline: float) -> Answer:
        answer = self._batcher.submit((item, self._clock.monotonic() + deadline))
        try:
            return await within(answer, deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {deadline:.0f} s", "look at the log of the peer") from error

    async def close(self) -> None:
        """Fail what has not been answered."""
        await self._batcher.close(finish=False)

    async def _send(self, items: list[tuple[Item, float]]) -> Sequence[Answer | RillflowError]:
        left = max(end for _, end in items) - self._clock.monotonic()
        return await self._call([item for item, _ in items], max(left, 0.001))


# ---------------------------------------------------------------- the service

_ANYWHERE = ("0.0.0.0", "::")  # who listens on all addresses of its host names none


def reached_by(url: str, service: str) -> str:
    """Where a process of the run listens, for who has reached its service under the URL `service`.

    One that listens on all addresses is looked for at the service's own.
    """
    parts = urlsplit(url)
    if parts.hostname not in _ANYWHERE:
        return url
    host = urlsplit(service).hostname or ""
    netloc = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{netloc}:{parts.port}" if parts.port else netloc))


class DataflowClient:
    """A method for each route of the service and of the updates of weights that it serves."""

    lease_tasks = Sends(Dataflow.lease_tasks)
    fail = Sends(Dataflow.fail)
    heartbeat = Sends(Dataflow.heartbeat)
    leave = Sends(Dataflow.leave)
    join = Sends(Dataflow.join)
    lease_batch = Sends(Dataflow.lease_batch)
    commit = Sends(Dataflow.commit)  # raises LeaseLost when the batch is no longer this trainer's
    renew_batch = Sends(Dataflow.renew_batch)  # raises LeaseLost when the batch is no longer held
    lease_stage = Sends(Dataflow.lease_stage)
    commit_stage = Sends(Dataflow.commit_stage)
    lose_rows = Sends(Dataflow.lose_rows)
    unit_beat = Sends(Dataflow.unit_beat)
    retire = Sends(Dataflow.retire)  # raises BadRequest when the run has no such node
    nodes = Reads(Dataflow.nodes)
    status = Reads(Dataflow.status)
    balance = Reads(Dataflow.balance)
    engine_beat = Sends(Updates.engine_beat)
    turn = Sends(Updates.turn)  # see `EngineTurn`
    fetching = Sends(Updates.fetching)  # see `FetchWord`

    def __init__(self, client: Client) -> None:
        self.wire = client
        self._completions: dict[int, Coalesced[CompleteTask, Ack]] = {}  # by ledger: one that is down delays no other

    async def complete(self, news: CompleteTask, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """Send a completion. Those sent at the same time to the same ledger share one call."""
        ledger = ledger_of(news.attempt)
        if ledger not in self._completions:
            self._completions[ledger] = Coalesced(self._complete)
        return await self._completions[ledger](news, deadline)

    async def _complete(self, news: Sequence[CompleteTask], deadline: float) -> list[Ack | RillflowError]:
        reply = await self.wire.call(Dataflow.complete, CompleteTasks(tasks=list(news)), deadline)
        return [from_body(one.error) if one.error else one.ack or Ack(accepted=False) for one in reply.taken]

    async def recipe(self, deadline: float = DEFAULT_DEADLINE) -> RunRecipe:
        """What a process needs that joins from elsewhere (`clients.joining`)."""
        told = await self.wire.call(Updates.recipe, None, deadline)
        return msgspec.structs.replace(told, weights=reached_by(told.weights, self.wire.url) if told.weights else "")

    async def weights_key(self, deadline: float = DEFAULT_DEADLINE) -> bytes:
        """The key with which a trainer of the run signs its weights."""
        return (await self.wire.call(Updates.weights_key, None, deadline)).key

    async def stop(self, reason: str = "stopped", deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.call(Dataflow.stop, StopRun(reason=reason), deadline)

    async def units(self, deadline: float = DEFAULT_DEADLINE) -> Units:
        """The storage units that were heard of lately, the least loaded first."""
        units = (await self.wire.call(Dataflow.units, None, deadline)).units
        return Units(units=[msgspec.structs.replace(one, url=reached_by(one.url, self.wire.url)) for one in units])

    async def engines(self, ask: LookEngines, deadline: float = DEFAULT_DEADLINE) -> Engines:
        """The engine processes that were heard of lately."""
        known = await self.wire.call(Updates.engines, ask, deadline)
        found = [msgspec.structs.replace(one, url=reached_by(one.url, self.wire.url)) for one in known.engines]
        return msgspec.structs.replace(known, engines=found)

    async def versions_in_use(self, policy: str, deadline: float = DEFAULT_DEADLINE) -> list[int]:
        """The versions of a policy that live nodes and engine processes serve, in ascending order."""
        return (await self.wire.call(Updates.versions_in_use, None, deadline)).get(policy, [])

    async def versions_wanted(self, policy: str, deadline: float = DEFAULT_DEADLINE) -> list[int]:
        """The versions of a policy that evaluations want kept: the best one, and those that are being evaluated."""
        return (await self.wire.call(Updates.versions_wanted, None, deadline)).get(policy, [])

    async def close(self) -> None:
        for completions in self._completions.values():
            await completions.close()
        await self.wire.close()


# ---------------------------------------------------------------- updates of weights

ANSWER = 2.0  # seconds that the service has for an answer
LONGEST = 60.0  # bounds a whole load of a large model by the first engine
_WAIT = 1.0  # that one question may wait for a turn
_RENEW_TURN = 1.5  # seconds between two calls of an engine that still changes its weights
RENEW_FETCH = 4.0  # seconds between two calls of an engine that still downloads

Ask = Callable[[AskTurn, float], Awaitable[TurnReply]]
Tell = Callable[[TellFetch, float], Awaitable[Ack]]


class EngineTurn:
    """`async with turn(): …` around a change of weights."""

    def __init__(self, ask: Ask, policy: str, engine: str, clock: Clock | None = None) -> None:
        self._ask = ask
        self._policy = policy
        self._engine = engine
        self._clock = clock or SystemClock()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        if not await self._granted():
            yield
            return
        renewing = asyncio.create_task(self._renew(), name="renew-turn")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})
            with suppress(RillflowError):  # then it expires
                await self._ask(AskTurn(policy=self._policy, engine=self._engine, done=True), ANSWER)

    async def _granted(self) -> bool:
        """False for who goes ahead without a turn."""
        end = self._clock.monotonic() + LONGEST
        ask = AskTurn(policy=self._policy, engine=self._engine, wait=_WAIT)
        while self._clock.monotonic() < end:
            try:
                if (await self._ask(ask, ANSWER)).granted:
                    return True
            except RillflowError as error:
                log.info("%s changes the weights of %s without a turn: %s", self._engine, self._policy, error.message)
                return False
        log.warning("%s got no turn to change the weights of %s in %.0f s", self._engine, self._policy, LONGEST)
        return False

    async def _renew(self) -> None:
        ask = AskTurn(policy=self._policy, engine=self._engine)
        while True:
            await asyncio.sleep(_RENEW_TURN)
            with suppress(RillflowError):
                await self._ask(ask, ANSWER)


class FetchWord:
    """`async with word(version): …` around a download. The announcement lasts until the engine reports that it
    serves the version."""

    def __init__(self, tell: Tell, policy: str, engine: str) -> None:
        self._tell = tell
        self._policy = policy
        self._engine = engine

    @asynccontextmanager
    async def __call__(self, version: int) -> AsyncIterator[None]:
        news = TellFetch(policy=self._policy, engine=self._engine, version=version)
        await self._say(news)
        renewing = asyncio.create_task(self._renew(news), name="renew-fetch")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})

    async def _renew(self, news: TellFetch) -> None:
        while True:
            await asyncio.sleep(RENEW_FETCH)
            await self._say(news)

    async def _say(self, news: TellFetch) -> None:
        try:
            await self._tell(news, ANSWER)
        except RillflowError as error:
            log.info("%s fetches version %d of %s untold: %s", self._engine, news.version, self._policy, error.message)

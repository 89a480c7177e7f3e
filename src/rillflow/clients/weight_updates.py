"""How an engine announces changes of its weights to the run's service.

`EngineTurn`: an engine's turn to change its weights, so that not all engines of a policy pause at once. `FetchWord`: an
engine that downloads a whole version announces it, and that version stays in the store meanwhile. Nothing depends on
either. Without an answer, or after `LONGEST` seconds in which others were first, an engine goes ahead; without an
announcement it downloads all the same, and plans again where a file has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import RillflowError
from rillflow.types import Ack, AskTurn, TellFetch, TurnReply

log = logging.getLogger(__name__)

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

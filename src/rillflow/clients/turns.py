"""An engine's turn to change its weights, so that not all engines of a policy pause at once.

Nothing depends on it: without an answer, or after `LONGEST` seconds in which others were first, the engine goes ahead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import RillflowError
from rillflow.types import AskTurn, TurnReply

log = logging.getLogger(__name__)

ANSWER = 2.0  # seconds that the service has for an answer
LONGEST = 60.0  # bounds a whole load of a large model by the first engine
_WAIT = 1.0  # that one question may wait for a turn
_RENEW = 1.5  # between two words of an engine that still changes its weights

Ask = Callable[[AskTurn, float], Awaitable[TurnReply]]


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
            await asyncio.sleep(_RENEW)
            with suppress(RillflowError):
                await self._ask(ask, ANSWER)

"""An engine that fetches a whole version says so, and that version stays in the store meanwhile.

Nothing depends on it: without an answer it fetches all the same, and plans again where a file has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rillflow.errors import RillflowError
from rillflow.types import Ack, TellFetch

log = logging.getLogger(__name__)

ANSWER = 2.0  # seconds that the service has for an answer
RENEW = 4.0  # between two words of an engine that still fetches

Tell = Callable[[TellFetch, float], Awaitable[Ack]]


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
            await asyncio.sleep(RENEW)
            await self._say(news)

    async def _say(self, news: TellFetch) -> None:
        try:
            await self._tell(news, ANSWER)
        except RillflowError as error:
            log.info("%s fetches version %d of %s untold: %s", self._engine, news.version, self._policy, error.message)

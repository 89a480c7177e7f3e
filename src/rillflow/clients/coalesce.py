"""Calls that are made at the same time travel together.

Two may be under way, so that the peer has work while the answer to the other is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic

from rillflow.batching import Answer, Batcher, Item
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DeadlineExceeded, RillflowError

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
            async with asyncio.timeout(deadline):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {deadline:.0f} s", "look at the log of the peer") from error

    async def close(self) -> None:
        """Fail what has not been answered."""
        await self._batcher.close(finish=False)

    async def _send(self, items: list[tuple[Item, float]]) -> Sequence[Answer | RillflowError]:
        left = max(end for _, end in items) - self._clock.monotonic()
        return await self._call([item for item, _ in items], max(left, 0.001))

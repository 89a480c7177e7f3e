"""Calls that are made at the same time travel together: whoever comes while two are under way goes with the next.

Two, so that the peer has work while the answer to the other is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import RillflowError, WireError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MOST = 256  # items that travel together
UNDER_WAY = 2


@dataclass(frozen=True)
class _Waiting(Generic[Item, Answer]):
    item: Item
    end: float
    answer: asyncio.Future[Answer]


class Coalesced(Generic[Item, Answer]):
    """`call(items, deadline)` answers each item with its result or with an error of its own, in the same order.

    Belongs to one event loop. A call that fails as a whole fails for everybody in it; the longest of their deadlines
    is its own, so nobody's news is given up before its time.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item], float], Awaitable[Sequence[Answer | RillflowError]]],
        clock: Clock | None = None,
    ) -> None:
        self._call = call
        self._clock = clock or SystemClock()
        self._waiting: list[_Waiting[Item, Answer]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def __call__(self, item: Item, deadline: float) -> Answer:
        mine = _Waiting[Item, Answer](
            item, self._clock.monotonic() + deadline, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(mine)
        if len(self._sending) < UNDER_WAY:
            sending = asyncio.create_task(self._send(), name="coalesced")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        return await mine.answer

    async def close(self) -> None:
        """Give up what has not been answered."""
        for sending in tuple(self._sending):
            sending.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        _give_up(self._waiting)

    async def _send(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            group = [one for one in group if not one.answer.done()]  # those who still wait for it
            try:
                if group:
                    await self._send_group(group)
            finally:
                _give_up(group)

    async def _send_group(self, group: list[_Waiting[Item, Answer]]) -> None:
        left = max(one.end for one in group) - self._clock.monotonic()
        try:
            answers = await self._call([one.item for one in group], max(left, 0.001))
            if len(answers) != len(group):
                raise WireError(f"{len(answers)} answers to {len(group)} calls", "the peer is of another version")
        except RillflowError as error:
            answers = [type(error)(error.message, error.hint) for _ in group]
        for one, answer in zip(group, answers, strict=True):
            if one.answer.done():
                continue
            if isinstance(answer, RillflowError):
                one.answer.set_exception(answer)
            else:
                one.answer.set_result(answer)


def _give_up(waiting: Sequence[_Waiting[Item, Answer]]) -> None:
    for one in waiting:
        one.answer.cancel()  # changes nothing where there is an answer

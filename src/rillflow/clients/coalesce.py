"""Calls that are made at the same time travel together: whoever comes while two are under way goes with the next.

Two, so that the peer has work while the answer to the other is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import DeadlineExceeded, RillflowError, Unavailable, WireError

log = logging.getLogger(__name__)

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
    is its own, so nobody's news is given up before its time, and nobody waits longer than they said.
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
        self._closed = False

    async def __call__(self, item: Item, deadline: float) -> Answer:
        if self._closed:
            raise _closed()
        mine = _Waiting[Item, Answer](
            item, self._clock.monotonic() + deadline, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(mine)
        if len(self._sending) < UNDER_WAY:
            sending = asyncio.create_task(self._send(), name="coalesced")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)  # for one that is cancelled before it begins
        try:
            async with asyncio.timeout(deadline):
                return await mine.answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {deadline:.0f} s", "look at the log of the peer") from error

    async def close(self) -> None:
        """What has not been answered fails."""
        self._closed = True
        for sending in tuple(self._sending):
            sending.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        _fail(self._waiting, _closed())

    async def _send(self) -> None:
        try:
            await self._send_all()
        finally:
            # At once, not when the loop comes round to it: who comes in between must not count on this one.
            self._sending.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _send_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            group = [one for one in group if not one.answer.done()]  # those who still wait for it
            try:
                if group:
                    await self._send_group(group)
            except RillflowError as error:
                _fail(group, error)
            except Exception as error:
                log.exception("a call of %d failed", len(group))
                _fail(group, WireError(f"a call failed: {type(error).__name__}: {error}", "see the log"))
            except BaseException:
                _fail(group, _closed())
                raise

    async def _send_group(self, group: list[_Waiting[Item, Answer]]) -> None:
        left = max(one.end for one in group) - self._clock.monotonic()
        answers = await self._call([one.item for one in group], max(left, 0.001))
        if len(answers) != len(group):
            raise WireError(f"{len(answers)} answers to {len(group)} calls", "the peer is of another version")
        for one, answer in zip(group, answers, strict=True):
            if one.answer.done():
                continue
            if isinstance(answer, RillflowError):
                one.answer.set_exception(answer)
            else:
                one.answer.set_result(answer)


def _closed() -> Unavailable:
    return Unavailable("the client was closed before there was an answer", "make a new one")


def _fail(waiting: Sequence[_Waiting[Item, Answer]], error: RillflowError) -> None:
    """Everybody who still waits gets an error of their own."""
    for one in waiting:
        if not one.answer.done():
            one.answer.set_exception(type(error)(error.message, error.hint))

"""Tasks from several ledgers for one node.

Every ledger has one question of the node under way, for a part of the node's room. The first answer is handed on; the
others stay under way and are handed on with the next call. So a ledger that has no tasks, or is down, causes no delay,
and a node never holds more tasks than it has room for.

A ledger that had nothing when it was last asked is asked for one task, so that it keeps little of the room. One that
did not answer is left alone for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from rillflow.contracts import Clock, SystemClock
from rillflow.errors import RillflowError
from rillflow.types import LeaseTasks, Phase, TaskLease, TaskLeases, new_attempt
from rillflow.types.routes import Dataflow
from rillflow.wire import Client

log = logging.getLogger(__name__)

ANSWER = 5.0  # seconds that a ledger has for an answer, beyond the question's own wait
REST = 2.0  # seconds after a ledger has not answered
SHORT = 0.2  # seconds that a question waits where the room is too small to ask every ledger


class TaskPolls:
    """The questions of one node. Belongs to one event loop."""

    def __init__(self, ledgers: Sequence[Client], clock: Clock | None = None) -> None:
        self._ledgers = ledgers
        self._clock = clock or SystemClock()
        self._polls: dict[int, asyncio.Task[TaskLeases]] = {}
        self._wants: dict[int, int] = {}  # the part of the room that each question under way is for
        self._attempts: dict[int, str] = {}  # of questions without an answer: asked again, they get the same leases
        self._had: dict[int, bool] = {}  # whether the last answer had tasks
        self._told: dict[int, TaskLeases] = {}  # the last answers
        self._resting: dict[int, float] = {}  # until when
        self._first = 0

    async def lease(self, ask: LeaseTasks) -> TaskLeases:
        """Return what has come, after `ask.wait` seconds at most; the error of a ledger where none of them answers."""
        self._ask(ask)
        await asyncio.wait(self._polls.values(), timeout=ask.wait + ANSWER, return_when=asyncio.FIRST_COMPLETED)
        done = {number: poll for number, poll in self._polls.items() if poll.done()}
        leases: list[TaskLease] = []
        errors: list[RillflowError] = []
        for number, poll in done.items():
            del self._polls[number], self._wants[number]
            try:
                reply = poll.result()
            except RillflowError as error:
                self._failed(number, error)
                errors.append(error)
                continue
            self._attempts.pop(number, None)
            self._had[number] = bool(reply.leases)
            self._told[number] = reply
            leases += reply.leases
        if errors and not self._told:
            raise errors[0]
        return TaskLeases(leases=leases, heads=self._heads(), phase=self._phase())

    def _failed(self, number: int, error: RillflowError) -> None:
        """Note that a ledger did not answer. Errors that a retry would not mend are raised."""
        if error.status < 500:
            raise error
        log.warning("no tasks from ledger %d: %s", number, error)
        self._had[number] = False
        self._told.pop(number, None)
        self._resting[number] = self._clock.monotonic() + REST

    def _ask(self, ask: LeaseTasks) -> None:
        """Begin a question for every ledger that has none, as far as there is room."""
        idle = self._idle()
        self._first = (self._first + 1) % len(self._ledgers)
        room = ask.want - sum(self._wants.values())
        shares = split(room, [self._had.get(number, True) for number in idle])
        wait = min(ask.wait, SHORT) if 0 in shares else ask.wait
        for number, share in zip(idle, shares, strict=True):
            if share or not self._polls:  # also a node without room hears what a ledger says
                self._begin(number, replace(ask, want=share, wait=wait))

    def _idle(self) -> list[int]:
        """Return the ledgers that may be asked, the next one in turn first; those that rest only where all do."""
        count, now = len(self._ledgers), self._clock.monotonic()
        idle = [n for n in ((self._first + i) % count for i in range(count)) if n not in self._polls]
        awake = [number for number in idle if self._resting.get(number, now) <= now]
        return awake or ([] if self._polls else idle)

    def _begin(self, number: int, ask: LeaseTasks) -> None:
        attempt = self._attempts.setdefault(number, new_attempt())
        call = self._ledgers[number].call(Dataflow.lease_tasks, replace(ask, attempt=attempt), ANSWER)
        self._polls[number] = asyncio.create_task(call, name=f"lease-{number}")
        self._wants[number] = ask.want

    def _heads(self) -> dict[str, int]:
        """The newest version of each policy that a ledger knows: a step reaches one after the other."""
        heads: dict[str, int] = {}
        for reply in self._told.values():
            heads |= {policy: max(version, heads.get(policy, version)) for policy, version in reply.heads.items()}
        return heads

    def _phase(self) -> Phase:
        ended = [reply.phase == "ended" for reply in self._told.values()]
        return "ended" if len(ended) == len(self._ledgers) and all(ended) else "training"

    async def close(self) -> None:
        """End the questions under way. Tasks that one of them has leased return when the node leaves, or in time."""
        polls = list(self._polls.values())
        self._polls.clear()
        self._wants.clear()
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


def split(room: int, had: Sequence[bool]) -> list[int]:
    """Divide the room among ledgers; `had` says which had tasks at their last answer.

    A ledger without tasks gets one place, the others share the rest evenly. If there are more ledgers than places, the
    first ones get one each."""
    count = len(had)
    if room <= count:
        return [int(place < room) for place in range(count)]
    busy = [place for place in range(count) if had[place]] or list(range(count))
    shares = [1] * count
    for n, place in enumerate(busy):
        left = room - (count - len(busy))
        shares[place] = left // len(busy) + (n < left % len(busy))
    return shares

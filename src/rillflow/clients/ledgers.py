"""Several ledgers of one run behind the calls of one.

A run's address is the URLs of its ledgers, in order, joined by commas. `connect` makes a client of an address; its
callers do not depend on the number of ledgers. Calls go to these ledgers:

tasks      leased from all ledgers (`TaskPolls`); the end of a task goes to the ledger that leased it
nodes      heartbeats, departures: to every ledger; one that does not answer delays the others by two seconds at most
batches    an equal part of every ledger; a step is committed to all of them, to the first one last
people     sums over all ledgers (`clients.sums`)
the rest   (updates of weights, evaluations) to the first ledger

Commits to several ledgers are not one transaction. A checkpoint is written after all of them, so every
ledger has the steps up to the checkpoint that a trainer restarts from. Joining rolls back the later steps in each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from rillflow.clients.dataflow import DataflowClient, reached_by
from rillflow.clients.sums import SEPARATOR, sum_batch, sum_joined, sum_nodes, sum_status, sum_waiting
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import LeaseLost, RillflowError, Unavailable
from rillflow.types import (
    Ack,
    BatchReply,
    CommitBatch,
    Committed,
    CompleteTasks,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    LeaveRun,
    LoseRows,
    NodeList,
    Phase,
    RenewBatch,
    RetireNode,
    Status,
    StopRun,
    TaskLease,
    TaskLeases,
    TasksTaken,
    TrainerJoined,
    UnitInfo,
    Units,
    new_attempt,
)
from rillflow.types.balance import LedgerBalances
from rillflow.types.routes import Dataflow, Route
from rillflow.types.runs import ledger_of, process_of
from rillflow.wire import Client
from rillflow.wire.client import DEFAULT_DEADLINE

Body = TypeVar("Body")
Reply = TypeVar("Reply")
log = logging.getLogger(__name__)

LATE = 2.0  # seconds that a ledger may answer after the first one, where its answer can be missed


def connect(address: str, token: str, *, clock: Clock | None = None) -> DataflowClient:
    """Return a client of the run at `address`."""
    clients = [
        Client(url, token, peer=process_of(number), clock=clock) for number, url in enumerate(address.split(","))
    ]
    return DataflowClient(clients[0] if len(clients) == 1 else Ledgers(clients, clock=clock))


class Ledgers(Client):
    """Calls several ledgers, in the order of their numbers, as if they were one service."""

    def __init__(self, ledgers: Sequence[Client], *, clock: Clock | None = None) -> None:
        super().__init__(ledgers[0].url, "", peer=ledgers[0].peer, clock=clock)
        self._all = list(ledgers)
        self._polls = TaskPolls(self._all, clock)
        self._units: dict[int, list[UnitInfo]] = {}
        self._ways: dict[Route[Any, Any], Callable[[Any, float], Awaitable[Any]]] = {
            Dataflow.lease_tasks: self._lease_tasks,
            Dataflow.complete: self._complete,
            Dataflow.fail: self._fail,
            Dataflow.heartbeat: self._heartbeat,
            Dataflow.leave: self._leave,
            Dataflow.join: self._join,
            Dataflow.lease_batch: self._lease_batch,
            Dataflow.commit: self._commit,
            Dataflow.renew_batch: self._renew_batch,
            Dataflow.lose_rows: self._lose_rows,
            Dataflow.units: self._list_units,
            Dataflow.retire: self._retire,
            Dataflow.stop: self._stop,
            Dataflow.nodes: self._nodes,
            Dataflow.status: self._status,
            Dataflow.balance: self._balance,
        }

    async def call(self, route: Route[Body, Reply], body: Body, deadline: float = DEFAULT_DEADLINE) -> Reply:
        way = self._ways.get(route)
        reply: Reply = await (self._all[0].call(route, body, deadline) if way is None else way(body, deadline))
        return reply

    async def close(self) -> None:
        await self._polls.close()
        for client in self._all:
            await client.close()

    # ------------------------------------------------------------ to all of them

    async def _answers(
        self, route: Route[Body, Reply], bodies: Sequence[Body], deadline: float
    ) -> list[Reply | RillflowError]:
        """Ask every ledger; one that is later than the others by `LATE` seconds has not answered."""
        calls = [
            asyncio.ensure_future(client.call(route, body, deadline))
            for client, body in zip(self._all, bodies, strict=True)
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(calls, timeout=LATE)
        finally:
            for call in calls:
                call.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        return [_reply_or_error(client.peer, one) for client, one in zip(self._all, found, strict=True)]

    async def _some(self, route: Route[Body, Reply], bodies: Sequence[Body], deadline: float) -> dict[int, Reply]:
        """Ask every ledger; returns the answers by number. An error only where none has answered."""
        found = await self._answers(route, bodies, deadline)
        errors = {number: one for number, one in enumerate(found) if isinstance(one, RillflowError)}
        if len(errors) == len(found):
            raise errors[0]
        for number, error in errors.items():
            log.info("ledger %d: %s", number, error)
        return {number: one for number, one in enumerate(found) if not isinstance(one, RillflowError)}

    async def _each(
        self, route: Route[Body, Reply], bodies: Sequence[tuple[int, Body]], deadline: float
    ) -> list[Reply]:
        """Ask these ledgers; an error where one of them has one. A lost lease is raised before other errors."""
        calls = (self._all[number].call(route, body, deadline) for number, body in bodies)
        found = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in sorted(errors, key=lambda error: not isinstance(error, LeaseLost)):
            raise error
        return [one for one in found if not isinstance(one, BaseException)]

    async def _every(self, route: Route[Body, Reply], body: Body, deadline: float) -> list[Reply]:
        return await self._each(route, [(number, body) for number in range(len(self._all))], deadline)

    # ------------------------------------------------------------ nodes

    async def _lease_tasks(self, ask: LeaseTasks, deadline: float) -> TaskLeases:
        return await self._polls.lease(ask)

    async def _complete(self, news: CompleteTasks, deadline: float) -> TasksTaken:
        """All of one call are of one ledger: see `DataflowClient.complete`."""
        (ledger,) = {ledger_of(task.attempt) for task in news.tasks}
        return await self._all[ledger].call(Dataflow.complete, news, deadline)

    async def _fail(self, news: FailTask, deadline: float) -> Ack:
        return await self._all[ledger_of(news.attempt)].call(Dataflow.fail, news, deadline)

    async def _heartbeat(self, beat: Heartbeat, deadline: float) -> HeartbeatReply:
        beats = [
            replace(beat, attempts=[attempt for attempt in beat.attempts if ledger_of(attempt) == number])
            for number in range(len(self._all))
        ]
        told = await self._some(Dataflow.heartbeat, beats, deadline)
        ended = len(told) == len(self._all) and all(reply.phase == "ended" for reply in told.values())
        return HeartbeatReply(
            lost=[attempt for reply in told.values() for attempt in reply.lost],
            heads=told[min(told)].heads,
            phase="ended" if ended else "training",
            leave=min((reply.leave for reply in told.values() if reply.leave is not None), default=None),
        )

    async def _leave(self, news: LeaveRun, deadline: float) -> Ack:
        await self._polls.close()  # a task that is leased after the node has left would wait for its lease to run out
        told = await self._some(Dataflow.leave, [news] * len(self._all), deadline)
        return told[min(told)]

    async def _retire(self, ask: RetireNode, deadline: float) -> Ack:
        told = await self._some(Dataflow.retire, [ask] * len(self._all), deadline)
        return told[min(told)]

    # ------------------------------------------------------------ trainers

    async def _join(self, news: JoinTrainer, deadline: float) -> TrainerJoined:
        return sum_joined(await self._every(Dataflow.join, news, deadline))

    async def _lease_batch(self, ask: LeaseBatch, deadline: float) -> BatchReply:
        part = replace(ask, groups=ask.groups // len(self._all))
        told = await self._every(Dataflow.lease_batch, part, deadline)
        if all(reply.spent for reply in told):
            last = replace(part, spent=True, wait=0.0)
            return (await self._every(Dataflow.lease_batch, last, deadline))[0]
        if any(reply.batch is None and not reply.spent for reply in told):
            return sum_waiting(told)
        return BatchReply(batch=sum_batch([reply.batch for reply in told if reply.batch]), phase="training")

    async def _commit(self, news: CommitBatch, deadline: float) -> Committed:
        """Commit the step to all ledgers. The first ledger comes last and gets the answers of the others."""
        named = {ledger_of(name): name for name in news.batch.split(SEPARATOR)}
        others = [(number, replace(news, batch=named.get(number, ""), kept=[])) for number in range(1, len(self._all))]
        told = await self._each(Dataflow.commit, others, deadline)
        for reply in told:
            if not reply.accepted:
                return reply
        parts = [reply.part for reply in told if reply.part is not None]
        return await self._all[0].call(Dataflow.commit, replace(news, batch=named.get(0, ""), parts=parts), deadline)

    async def _renew_batch(self, ask: RenewBatch, deadline: float) -> Ack:
        parts = [(ledger_of(name), replace(ask, batch=name)) for name in ask.batch.split(SEPARATOR)]
        told = await self._each(Dataflow.renew_batch, parts, deadline)
        return next((ack for ack in told if not ack.accepted), told[0])

    async def _lose_rows(self, news: LoseRows, deadline: float) -> Ack:
        """Report the rows to all ledgers. A ledger ignores the rows of others."""
        return (await self._every(Dataflow.lose_rows, news, deadline))[0]

    # ------------------------------------------------------------ units and people

    async def _list_units(self, _: None, deadline: float) -> Units:
        """The units of a ledger that does not answer are listed as they were: they may be well."""
        told = await self._some(Dataflow.units, [None] * len(self._all), deadline)
        for number, reply in told.items():
            url = self._all[number].url
            self._units[number] = [replace(info, ledger=number, url=reached_by(info.url, url)) for info in reply.units]
        return Units(units=sorted((info for infos in self._units.values() for info in infos), key=lambda i: i.load))

    async def _stop(self, ask: StopRun, deadline: float) -> Ack:
        return (await self._every(Dataflow.stop, ask, deadline))[0]

    async def _nodes(self, _: None, deadline: float) -> NodeList:
        return sum_nodes(await self._every(Dataflow.nodes, None, deadline))

    async def _status(self, _: None, deadline: float) -> Status:
        return sum_status(await self._every(Dataflow.status, None, deadline))

    async def _balance(self, _: None, deadline: float) -> LedgerBalances:
        told = await self._every(Dataflow.balance, None, deadline)
        return LedgerBalances(ledgers=[balance for reply in told for balance in reply.ledgers])


def _reply_or_error(peer: str, found: Reply | BaseException) -> Reply | RillflowError:
    if isinstance(found, asyncio.CancelledError):
        return Unavailable(f"{peer} answers later than the others", f"look at the log of {peer}")
    if isinstance(found, BaseException) and not isinstance(found, RillflowError):
        raise found
    return found


# ---------------------------------------------------------------- tasks from several ledgers

ANSWER = 5.0  # seconds that a ledger has for an answer, beyond the question's own wait
REST = 2.0  # seconds after a ledger has not answered
SHORT = 0.2  # seconds that a question waits where the room is too small to ask every ledger


class TaskPolls:
    """Requests of one node for tasks, to several ledgers. Belongs to one event loop.

    Every ledger has one request of the node under way, for a part of the node's room. The first answer is returned; the
    others stay under way and are returned by the next call. So a ledger that has no tasks, or is down, causes no delay,
    and a node never holds more tasks than it has room for.

    A ledger that had nothing when it was last asked is asked for one task, so that it keeps little of the room. One
    that did not answer is not asked again for `REST` seconds.
    """

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

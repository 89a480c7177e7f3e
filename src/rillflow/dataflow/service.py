"""The dataflow service: the ledger behind HTTP. Payloads never pass through it.

Every answer to a call that changes something goes out after the change is durable. Long polls are bounded, and what
they wait for is part of the status. A housekeeping task returns lost leases, admits prompts and detects the end of the
run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rillflow.batching import Batcher
from rillflow.contracts import Clock, GroupReward, SystemClock
from rillflow.dataflow import report
from rillflow.dataflow.balance_ledger import BalanceGauges
from rillflow.dataflow.group_commit import GroupCommit, Journal, Watch
from rillflow.dataflow.group_rewards import GroupScorer
from rillflow.dataflow.hooks.running import Beside, HookPending
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.report import LedgerGauges
from rillflow.dataflow.trajectory_keeper import TrajectoryKeeper
from rillflow.errors import RillflowError, StorageError, to_body
from rillflow.storage.trajectories import Bounds
from rillflow.types import (
    Ack,
    BatchReply,
    CommitBatch,
    CommitStage,
    Committed,
    CompleteTask,
    CompleteTasks,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    LeaveRun,
    LoseRows,
    NodeList,
    RenewBatch,
    RetireNode,
    Status,
    StopRun,
    Taken,
    TaskLeases,
    TasksTaken,
    TrainerJoined,
    UnitBeat,
    UnitBeatReply,
    Units,
)
from rillflow.types.balance import LedgerBalances
from rillflow.types.routes import Dataflow
from rillflow.weights.manifest import key_of
from rillflow.weights.updates import Invitation, RunFacts, WeightUpdates
from rillflow.wire import Service
from rillflow.wire.blocking import News
from rillflow.wire.tokens import scoped_token

Reply = TypeVar("Reply")
log = logging.getLogger(__name__)

LONGEST_POLL = 60.0
HOUSEKEEPING = 0.2
NEWS_PAUSE = 0.002
_MOST_COMPLETIONS = 256  # taken in one transition
_TRANSITIONS = 64  # of completions that wait for the disk: those made during a sync are durable with the next
_SHOWN = 300  # letters of what is wrong with a node's weights


class DataflowService(Service):
    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        token: str,
        *,
        commit_interval: float = 0.005,
        clock: Clock | None = None,
        body_limit: int = 64 << 20,
        invitation: Invitation | None = None,
        hook_timeout: float = 10.0,
        group_reward: GroupReward | None = None,
        reward_timeout: float = 20.0,
        keep: tuple[Path, Bounds] | None = None,
    ) -> None:
        """`keep` says where trajectories are kept for people, and how many."""
        super().__init__("dataflow", token, body_limit=body_limit)
        self._ledger = ledger
        self._journal = journal
        self._clock = clock or SystemClock()
        self._disk = GroupCommit(ledger, commit_interval, lambda until: journal.catch_up(ledger, until), self._break)
        self._broken: asyncio.Future[None] | None = None
        self._tasks_news, self._batch_news = News(NEWS_PAUSE), News(NEWS_PAUSE)
        self._told: tuple[int, dict[str, int], str] = (0, {}, "")
        self._started = self._clock.monotonic()
        self._waits: dict[int, Callable[[], str]] = {}
        self._troubles: dict[str, str] = {}  # what nodes say is wrong with their engines' weights
        self._completions: Batcher[list[CompleteTask], list[Ack | RillflowError]] = Batcher(
            self._take, at_once=_TRANSITIONS, most_size=_MOST_COMPLETIONS
        )
        self._housekeeper: asyncio.Task[None] | None = None
        self._beside = ledger.run_hooks_beside(hook_timeout)
        self._admitting: asyncio.Task[None] | None = None
        self._scorer: GroupScorer | None = None
        if group_reward is not None:
            self._scorer = GroupScorer(
                ledger, group_reward, token, seconds=reward_timeout, carry_out=self._carry_out, clock=self._clock
            )
        self._keeper = None if keep is None else TrajectoryKeeper(ledger, *keep, token, self.registry)
        self.registry.register(LedgerGauges(ledger, self._clock))
        self.registry.register(BalanceGauges(ledger.balances))
        facts = RunFacts(
            list(ledger.rules.policies),
            serving=ledger.nodes.serving,
            wanted=ledger.evaluations.wanted,
            ended=lambda: ledger.phase == "ended",
        )
        self._updates = WeightUpdates(facts, invitation, clock, key=key_of(scoped_token(token, "node")))
        self._updates.mount(self)
        self._bind_routes()

    def _bind_routes(self) -> None:
        self.on(Dataflow.lease_tasks, self._lease_tasks)
        self.on(Dataflow.complete, self._complete)
        self.on(Dataflow.fail, self._fail)
        self.on(Dataflow.heartbeat, self._heartbeat)
        self.on(Dataflow.leave, self._leave)
        self.on(Dataflow.join, self._join)
        self.on(Dataflow.lease_batch, self._lease_batch)
        self.on(Dataflow.commit, self._commit_batch)
        self.on(Dataflow.renew_batch, self._renew_batch)
        self.on(Dataflow.lease_stage, self._lease_stage)
        self.on(Dataflow.commit_stage, self._commit_stage)
        self.on(Dataflow.lose_rows, self._lose_rows)
        self.on(Dataflow.units, self._units)
        self.on(Dataflow.unit_beat, self._unit_beat)
        self.on(Dataflow.retire, self._retire)
        self.on(Dataflow.stop, self._stop_run)
        self.on(Dataflow.nodes, self._nodes)
        self.on(Dataflow.status, self._status)
        self.on(Dataflow.balance, self._balance)

    # ------------------------------------------------------------ life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        self._broken = asyncio.get_running_loop().create_future()
        await self._do(self._ledger.advance)
        self._ledger.commit()
        self._journal.catch_up(self._ledger)
        url = await super().start(host, port)
        self._housekeeper = asyncio.create_task(self._keep_house(), name="dataflow-housekeeping")
        return url

    async def stop(self) -> None:
        for task in (self._housekeeper, self._admitting):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._scorer is not None:
            await self._scorer.close()
        if self._keeper is not None:
            await self._keeper.close()
        await super().stop()
        await self._completions.close(finish=True)
        await self._disk.close()

    async def serve(self) -> None:
        """Until the caller cancels; raises when the disk has failed in a way that only a new start can mend."""
        assert self._broken is not None, "started before"
        await self._broken

    def _break(self, error: RillflowError) -> None:
        log.critical("%s", error)
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # retrieved: asyncio logs an exception that is never retrieved

    async def _keep_house(self) -> None:
        watch = Watch(self._clock, self._ledger.rules.node_timeout / 2)
        unheard = False  # the disk took nothing, so no lease could be renewed
        while True:
            await asyncio.sleep(HOUSEKEEPING)
            try:
                if watch.disturbed() or unheard:
                    await self._do(self._ledger.grace)
                await self._do(self._ledger.expire)
                await self._changed(None)
                unheard = False
                if self._keeper is not None:
                    self._keeper.look()
            except RillflowError as error:
                unheard = isinstance(error, StorageError)
                log.error("housekeeping: %s", error)
            except Exception:
                log.exception("housekeeping failed")

    # ------------------------------------------------------------ hooks

    async def _do(self, transition: Callable[[], Reply]) -> Reply:
        """Carry out a transition. While a user's hook that it needs is at work, the event loop serves others."""
        beside = self._beside
        await self._disk.room()
        if beside is None:
            return transition()
        while True:
            beside.begin()
            try:
                reply = transition()
            except HookPending as pending:
                await beside.run(pending)
                await self._disk.room()
                continue
            except Exception:
                beside.refused()
                raise
            beside.done()
            if beside.wanted and self._admitting is None:
                self._admitting = asyncio.create_task(self._admit_on(beside), name="dataflow-admission")
            return reply

    async def _admit_on(self, beside: Beside) -> None:
        """Ask the curators on, one prompt after the other, for as long as there is room for prompts."""
        try:
            while wanted := next(iter(beside.wanted.values()), None):
                await beside.run(wanted)
                await self._do(self._ledger.advance)
                self._tell()
            await self._disk.durable()
        except RillflowError as error:  # the next transition that admits begins again
            log.error("admission: %s", error)
        finally:
            self._admitting = None

    async def _changed(self, reply: Reply) -> Reply:
        """Wake the polls of others at once; return the reply to a change after it is durable."""
        self._tell()
        await self._disk.durable()
        return reply

    async def _carry_out(self, transition: Callable[[], Reply]) -> Reply:
        return await self._changed(await self._do(transition))

    def _tell(self) -> None:
        """Wake the polls whose answer may be another now, and score the groups that are complete."""
        ledger = self._ledger
        if self._scorer is not None:
            self._scorer.look()
        now = (ledger.moves, ledger.heads, ledger.phase)
        if now != self._told:
            self._batch_news.tell()
        # The end of a group alone makes no task: to wake every node for it would cost as many empty leases.
        if self._tasks_news.waiting and (now[1:] != self._told[1:] or ledger.tasks.any_pending):
            self._tasks_news.tell()
        self._told = now

    # ------------------------------------------------------------ waiting

    async def _poll(
        self, ask: Callable[[], Reply], done: Callable[[Reply], bool], wait: float, news: News, why: Callable[[], str]
    ) -> Reply:
        """Ask until it is `done` or the time is over; the status says meanwhile what is waited for."""
        end = self._clock.monotonic() + (min(wait, LONGEST_POLL) if wait > 0 else 0.0)
        while True:
            reply = await self._do(ask)
            left = end - self._clock.monotonic()
            if done(reply) or left <= 0:
                return await self._changed(reply)
            with self._waiting(why):
                await news.wait(left)

    @contextmanager
    def _waiting(self, why: Callable[[], str]) -> Iterator[None]:
        self._waits[id(why)] = why
        try:
            yield
        finally:
            del self._waits[id(why)]

    # ------------------------------------------------------------ nodes

    async def _lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        heads = self._ledger.heads  # once they have moved, the versions that the node asked with may be too old

        def done(reply: TaskLeases) -> bool:
            # They may have moved just before it asked, too: who does not know would wait for the next step.
            behind = any(ask.versions.get(policy, head) < head for policy, head in reply.heads.items())
            return bool(reply.leases) or reply.phase == "ended" or ask.want < 1 or behind or reply.heads != heads

        return await self._poll(
            lambda: self._ledger.lease_tasks(ask),
            done,
            ask.wait,
            self._tasks_news,
            lambda: f"node {ask.node} waits for {self._ledger.why_no_tasks(ask.node, ask.versions)}",
        )

    async def _complete(self, news: CompleteTasks) -> TasksTaken:
        taken = [
            Taken(error=to_body(one)) if isinstance(one, RillflowError) else Taken(ack=one)
            for one in await self._completions.submit(news.tasks, len(news.tasks))
        ]
        return TasksTaken(taken=taken)

    async def _take(self, calls: list[list[CompleteTask]]) -> list[list[Ack | RillflowError]]:
        """Take the completions of several calls in one transition: one of many costs the ledger less than one alone."""
        news = [one for call in calls for one in call]
        answers = iter(await self._carry_out(lambda: self._ledger.complete_many(news)))
        return [[next(answers) for _ in call] for call in calls]

    async def _fail(self, news: FailTask) -> Ack:
        ack = await self._changed(await self._do(lambda: self._ledger.fail(news)))
        if self._keeper is not None and ack.accepted:
            self._keeper.failed(news)
        return ack

    async def _heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        reply = await self._do(lambda: self._ledger.renew(beat))
        if beat.trouble or beat.node in self._troubles:
            self._troubles[beat.node] = beat.trouble
        return await self._changed(reply)

    async def _retire(self, ask: RetireNode) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.retire(ask)))

    async def _leave(self, news: LeaveRun) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.leave(news)))

    async def _nodes(self) -> NodeList:
        return NodeList(nodes=self._ledger.nodes.infos())

    # ------------------------------------------------------------ the trainer

    async def _lease_batch(self, ask: LeaseBatch) -> BatchReply:
        return await self._poll(
            lambda: self._ledger.lease_batch(ask),
            lambda reply: reply.batch is not None or reply.phase != "training",
            ask.wait,
            self._batch_news,
            lambda: (
                f"the trainer of {ask.policy} waits for a batch: {self._ledger.waiting_for(ask.policy, ask.groups)}"
            ),
        )

    async def _commit_batch(self, news: CommitBatch) -> Committed:
        ack = await self._changed(await self._do(lambda: self._ledger.commit_batch(news)))
        if self._keeper is not None and ack.accepted:
            self._keeper.committed(news)
        return ack

    async def _renew_batch(self, ask: RenewBatch) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.renew_batch(ask)))

    async def _join(self, news: JoinTrainer) -> TrainerJoined:
        joined = await self._changed(await self._do(lambda: self._ledger.join_trainer(news)))
        if invitation := self._updates.invitation:
            invitation.serves(news.policy, news.weights)
        return joined

    async def _lease_stage(self, ask: LeaseStage) -> BatchReply:
        return await self._poll(
            lambda: self._ledger.lease_stage(ask),
            lambda reply: reply.batch is not None or reply.phase != "training",
            ask.wait,
            self._batch_news,
            lambda: f"stage {ask.stage} of {ask.policy} waits for groups",
        )

    async def _commit_stage(self, news: CommitStage) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.commit_stage(news)))

    # ------------------------------------------------------------ storage units

    async def _unit_beat(self, beat: UnitBeat) -> UnitBeatReply:
        reply = await self._changed(await self._do(lambda: self._ledger.unit_beat(beat)))
        return msgspec.structs.replace(reply, ended=self._ledger.phase == "ended")

    async def _units(self) -> Units:
        return self._ledger.units()

    async def _lose_rows(self, news: LoseRows) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.lose_rows(news)))

    # ------------------------------------------------------------ people and supervisors

    async def _stop_run(self, body: StopRun) -> Ack:
        await self._do(lambda: self._ledger.stop(body.reason[:500] or "stopped"))
        return await self._changed(Ack(accepted=True))

    async def _status(self) -> Status:
        # A stage waits whenever it is faster than the nodes: trainers, which wait for all others, come first.
        asked = sorted((why() for why in list(self._waits.values())), key=lambda wait: wait.startswith("stage "))
        waits = [*self._in_trouble(), *self._updates.waits(), *asked]
        if self._scorer is not None:
            waits += self._scorer.waits()
        if self._ledger.phase != "ended" and self._ledger.nodes.healthy == 0:
            waits.append(self._absent("rollout node", self._ledger.nodes.seen))
        if self._ledger.phase != "ended" and self._ledger.storage.count == 0:
            waits.append(self._absent("storage unit", self._ledger.storage.seen))
        status = report.status(self._ledger, waits)
        if self._keeper is None:
            return status
        return msgspec.structs.replace(status, notes=status.notes | self._keeper.note())

    def _in_trouble(self) -> Iterator[str]:
        """Nodes that do not sample because of their weights."""
        for node in self._ledger.nodes.infos() if any(self._troubles.values()) else []:
            if node.state == "healthy" and (trouble := self._troubles.get(node.name)):
                yield f"node {node.name}: {trouble[:_SHOWN]}"

    def _absent(self, what: str, seen: float | None) -> str:
        """Describe the wait for a kind of process that the run needs; one was `seen` last at that time."""
        if seen is None:
            return f"waiting for the first {what} to start ({self._clock.monotonic() - self._started:.0f} s)"
        return f"waiting for a {what}: the last one was heard of {max(self._clock.now() - seen, 0.0):.0f} s ago"

    async def _balance(self) -> LedgerBalances:
        return LedgerBalances(ledgers=[self._ledger.balances.now()])

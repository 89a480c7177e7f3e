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

from rillflow.contracts import Clock, GroupReward, SystemClock
from rillflow.dataflow import report
from rillflow.dataflow.balance import Balance
from rillflow.dataflow.balance_ledger import BalanceGauges
from rillflow.dataflow.engines import EngineRoster
from rillflow.dataflow.fetches import Fetches
from rillflow.dataflow.flow import GroupCommit, News, Watch
from rillflow.dataflow.gauges import LedgerGauges
from rillflow.dataflow.group_scorer import GroupScorer
from rillflow.dataflow.hooks.beside import Beside, HookPending
from rillflow.dataflow.joining import Invitation
from rillflow.dataflow.journal import Journal
from rillflow.dataflow.ledger import Ledger
from rillflow.dataflow.trajectory_keeper import TrajectoryKeeper
from rillflow.dataflow.turns import Turns
from rillflow.errors import BadRequest, RillflowError, StorageError, to_body
from rillflow.storage.trajectories import Bounds
from rillflow.types import (
    Ack,
    AskTurn,
    BatchReply,
    CommitBatch,
    CommitStage,
    CompleteTasks,
    EngineInfo,
    Engines,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    LeaveRun,
    LookEngines,
    LoseRows,
    NodeList,
    RenewBatch,
    RetireNode,
    RunRecipe,
    Status,
    StopRun,
    Taken,
    TaskLeases,
    TasksTaken,
    TellFetch,
    TrainerJoined,
    TurnReply,
    UnitBeat,
    UnitBeatReply,
    Units,
)
from rillflow.wire import Service

Reply = TypeVar("Reply")
log = logging.getLogger(__name__)

LONGEST_POLL = 60.0
HOUSEKEEPING = 0.2
NEWS_PAUSE = 0.002
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
        self._invitation = invitation
        self._ledger = ledger
        self._journal = journal
        self._engines = EngineRoster(clock)
        self._clock = clock or SystemClock()
        self._disk = GroupCommit(ledger, commit_interval, lambda until: journal.catch_up(ledger, until), self._break)
        self._broken: asyncio.Future[None] | None = None
        self._tasks_news, self._batch_news = News(NEWS_PAUSE), News(NEWS_PAUSE)
        self._turn_news, self._engine_news = News(NEWS_PAUSE), News(NEWS_PAUSE)
        self._turns = Turns(clock)
        self._fetches = Fetches(clock)
        self._told: tuple[int, dict[str, int], str] = (0, {}, "")
        self._started = self._clock.monotonic()
        self._waits: dict[int, Callable[[], str]] = {}
        self._troubles: dict[str, str] = {}  # what nodes say is wrong with their engines' weights
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
        self._add_routes()

    def _add_routes(self) -> None:
        self.post("/tasks/lease", self._lease_tasks, LeaseTasks, "node")
        self.post("/tasks/complete", self._complete, CompleteTasks, "node")
        self.post("/tasks/fail", self._fail, FailTask, "node")
        self.post("/nodes/heartbeat", self._heartbeat, Heartbeat, "node")
        self.post("/nodes/leave", self._leave, LeaveRun, "node")
        self.get("/recipe", self._recipe, "node")
        self.post("/engines/beat", self._engine_beat, EngineInfo, "node")
        self.post("/engines", self._all_engines, LookEngines, "node")
        self.post("/weights/turn", self._turn, AskTurn, "node")
        self.post("/weights/fetch", self._fetch, TellFetch, "node")
        self.post("/trainers/join", self._join, JoinTrainer, "trainer")
        self.post("/batches/lease", self._lease_batch, LeaseBatch, "trainer")
        self.post("/batches/commit", self._commit_batch, CommitBatch, "trainer")
        self.post("/batches/renew", self._renew_batch, RenewBatch, "trainer")
        self.post("/stages/lease", self._lease_stage, LeaseStage, "trainer")
        self.post("/stages/commit", self._commit_stage, CommitStage, "trainer")
        self.post("/rows/lost", self._lose_rows, LoseRows, "trainer")
        self.get("/weights/versions", self._versions_in_use, "trainer")
        self.get("/weights/wanted", self._versions_wanted, "trainer")
        self.get("/units", self._units, "node", "trainer")
        self.post("/units/beat", self._unit_beat, UnitBeat, "operator")
        self.post("/nodes/retire", self._retire, RetireNode, "operator")
        self.post("/stop", self._stop_run, StopRun, "operator")
        self.get("/nodes", self._nodes, "reader")
        self.get("/status", self._status, "reader")
        self.get("/balance", self._balance, "reader")

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
        await self._disk.close()

    async def serve(self) -> None:
        """Until the caller cancels; raises when the disk has failed in a way that only a new start can mend."""
        assert self._broken is not None, "started before"
        await self._broken

    def _break(self, error: RillflowError) -> None:
        log.critical("%s", error)
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # seen, also when nobody serves any more

    async def _keep_house(self) -> None:
        watch = Watch(self._clock, self._ledger.rules.node_timeout / 2)
        unheard = False  # the disk took nothing, so nobody could renew a lease
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
        """The reply to a change: others are told at once, the caller after the change is durable."""
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
            for one in await self._do(lambda: self._ledger.complete_many(news.tasks))
        ]
        return await self._changed(TasksTaken(taken=taken))

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

    async def _recipe(self) -> RunRecipe:
        if self._invitation is None:
            raise BadRequest("this service has no recipe to tell", "start it with `rillflow dataflow RUN`")
        return self._invitation.answer()

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

    async def _commit_batch(self, news: CommitBatch) -> Ack:
        ack = await self._changed(await self._do(lambda: self._ledger.commit_batch(news)))
        if self._keeper is not None and ack.accepted:
            self._keeper.committed(news)
        return ack

    async def _renew_batch(self, ask: RenewBatch) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.renew_batch(ask)))

    async def _join(self, news: JoinTrainer) -> TrainerJoined:
        return await self._changed(await self._do(lambda: self._ledger.join_trainer(news)))

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
        return await self._changed(await self._do(lambda: self._ledger.unit_beat(beat)))

    async def _units(self) -> Units:
        return self._ledger.units()

    async def _lose_rows(self, news: LoseRows) -> Ack:
        return await self._changed(await self._do(lambda: self._ledger.lose_rows(news)))

    # ------------------------------------------------------------ engine processes

    async def _engine_beat(self, info: EngineInfo) -> Engines:
        before = self._engines.engines().news
        known = self._engines.hear(info)
        if known.news != before:
            self._engine_news.tell()
        if self._ledger.phase != "ended":
            return known
        self._engines.forget(info.name)
        return msgspec.structs.replace(known, ended=True)

    async def _all_engines(self, ask: LookEngines) -> Engines:
        end = self._clock.monotonic() + min(ask.wait, LONGEST_POLL)
        while (known := self._engines.engines()).news == ask.news and (left := end - self._clock.monotonic()) > 0:
            await self._engine_news.wait(left)
        return known

    # ------------------------------------------------------------ weights

    async def _turn(self, ask: AskTurn) -> TurnReply:
        policy = self._known(ask.policy)
        if ask.done:
            self._turns.done(policy, ask.engine)
            self._turn_news.tell()
            return TurnReply(granted=False)
        return await self._poll(
            lambda: TurnReply(granted=self._turns.ask(policy, ask.engine, len(self._engines_of(policy)))),
            lambda reply: reply.granted,
            ask.wait,
            self._turn_news,
            lambda: f"{ask.engine} waits to change the weights of {policy}: others do so now",
        )

    def _known(self, policy: str) -> str:
        policies = self._ledger.rules.policies
        if policy not in policies:
            raise BadRequest(f"there is no policy {policy!r:.80}", f"one of: {', '.join(policies)}")
        return policy

    async def _fetch(self, news: TellFetch) -> Ack:
        self._known(news.policy)
        self._fetches.tell(news)
        return Ack(accepted=True)

    async def _versions_in_use(self) -> dict[str, list[int]]:
        """Of all that serve, and of all that fetch what they will serve."""
        sources = (self._engines.serving, self._ledger.nodes.serving, self._fetches.versions)
        return {
            policy: sorted({version for source in sources for version in source(policy)})
            for policy in self._ledger.rules.policies
        }

    async def _versions_wanted(self) -> dict[str, list[int]]:
        """Those that evaluations want kept."""
        return {policy: self._ledger.evaluations.wanted(policy) for policy in self._ledger.rules.policies}

    def _engines_of(self, policy: str) -> list[int]:
        """The versions of all that sample by themselves: engine processes where there are any, else the nodes."""
        return self._engines.serving(policy) or self._ledger.nodes.serving(policy)

    # ------------------------------------------------------------ people and supervisors

    async def _stop_run(self, body: StopRun) -> Ack:
        await self._do(lambda: self._ledger.stop(body.reason[:500] or "stopped"))
        return await self._changed(Ack(accepted=True))

    async def _status(self) -> Status:
        waits = [*self._in_trouble(), *(why() for why in list(self._waits.values()))]
        if self._scorer is not None:
            waits += self._scorer.waits()
        if self._ledger.phase != "ended" and self._ledger.nodes.healthy == 0:
            waits.append(self._absent("rollout node", self._ledger.nodes.seen))
        if self._ledger.phase != "ended" and self._ledger.roster.count == 0:
            waits.append(self._absent("storage unit", self._ledger.roster.seen))
        status = report.status(self._ledger, waits)
        if self._keeper is None:
            return status
        return msgspec.structs.replace(status, notes=status.notes | self._keeper.note())

    def _in_trouble(self) -> Iterator[str]:
        """Nodes and engines that are there and do not sample because of their weights."""
        for node in self._ledger.nodes.infos() if any(self._troubles.values()) else []:
            if node.state == "healthy" and (trouble := self._troubles.get(node.name)):
                yield f"node {node.name}: {trouble[:_SHOWN]}"
        for engine in self._engines.engines().engines:
            if engine.trouble:
                yield f"engine {engine.name}: {engine.trouble[:_SHOWN]}"

    def _absent(self, what: str, seen: float | None) -> str:
        """What to say while no process of a kind is alive that the run needs; one was `seen` last at that time."""
        if seen is None:
            return f"waiting for the first {what} to start ({self._clock.monotonic() - self._started:.0f} s)"
        return f"waiting for a {what}: the last one was heard of {max(self._clock.now() - seen, 0.0):.0f} s ago"

    async def _balance(self) -> Balance:
        return self._ledger.balances.now()

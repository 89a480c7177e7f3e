"""A dataflow service on a free port, with clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dataflow_world import POLICY, RULES, UNIT, FakeClock, changed, prompts
from rillflow.clients.dataflow import DataflowClient
from rillflow.contracts import Clock, GroupReward, PromptSource
from rillflow.dataflow.group_commit import Journal
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.service import DataflowService
from rillflow.storage.trajectories import Bounds
from rillflow.storage.trajectory_format import FILE
from rillflow.types import (
    Batch,
    BatchReply,
    CommitBatch,
    CompleteTask,
    JoinTrainer,
    KeptTokens,
    LeaseBatch,
    LeaseTasks,
    Row,
    SampleMeta,
    TaskLease,
    TaskLeases,
    UnitBeat,
    UnitInfo,
)
from rillflow.wire import Client

TOKEN = "secret"


class Served:
    """A running service and short words for calling it."""

    def __init__(self, url: str, folder: Path, ledger: Ledger, service: DataflowService) -> None:
        self.url = url
        self.service = service
        self.folder = folder
        self.ledger = ledger
        self.rows = 0
        self.client = DataflowClient(Client(url, TOKEN, peer="dataflow"))

    @property
    def head(self) -> int:
        return self.ledger.lineage.head(POLICY)

    async def lease(self, want: int = 100, version: int | None = None, wait: float = 0.0) -> TaskLeases:
        version = self.head if version is None else version
        ask = LeaseTasks(node="n0", incarnation="a", want=want, versions={POLICY: version}, wait=wait)
        return await self.client.lease_tasks(ask)

    async def done(self, lease: TaskLease, version: int | None = None) -> bool:
        version = self.head if version is None else version
        self.rows += 1
        row = Row(unit=UNIT, segment=0, offset=8 * self.rows, length=8)
        reward = float(lease.task.place)
        sample = SampleMeta(policy=POLICY, row=row, tokens=4, trained=4, oldest=version, newest=version, reward=reward)
        news = CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node="n0",
            reward=reward,
            samples=[sample],
            calls=1,
            seconds=0.1,
        )
        return (await self.client.complete(news)).accepted

    def beat(self) -> UnitBeat:
        return UnitBeat(info=UnitInfo(unit=UNIT, path=""))

    async def play_all(self) -> None:
        while leases := (await self.lease()).leases:
            for lease in leases:
                assert await self.done(lease)

    async def waits_for(self, about: Callable[[list[str]], object]) -> None:
        """Ask for the status until what is waited for is as `about` says."""
        async with asyncio.timeout(60):
            while not about((await self.client.status()).waits):
                pass

    async def housekeeping(self) -> None:
        """Wait for the next round of housekeeping."""
        kept, expire = asyncio.Event(), self.ledger.expire
        self.ledger.expire = lambda: (expire(), kept.set())  # type: ignore[assignment, method-assign]
        try:
            await asyncio.wait_for(kept.wait(), 60)
        finally:
            del self.ledger.expire

    async def pass_time(self, clock: FakeClock, seconds: int) -> None:
        """Move the clock, in steps that the service does not take for a standstill."""
        for _ in range(seconds):
            clock.time += 1.0
            await self.housekeeping()

    async def join(self, checkpoint: int = 0, incarnation: str = "i") -> None:
        await self.client.join(JoinTrainer(policy=POLICY, incarnation=incarnation, checkpoint=checkpoint))

    async def ask(self, attempt: str, wait: float = 0.0) -> BatchReply:
        return await self.client.lease_batch(
            LeaseBatch(
                policy=POLICY,
                incarnation="i",
                attempt=attempt,
                groups=self.ledger.rules.policies[POLICY].batch_groups,
                version=self.head,
                wait=wait,
            )
        )

    async def commit(
        self,
        batch: Batch,
        version: int,
        metrics: dict[str, float] | None = None,
        kept: Sequence[KeptTokens] = (),
    ) -> bool:
        news = CommitBatch(
            policy=POLICY,
            incarnation="i",
            batch=batch.id,
            attempt=batch.attempt,
            version=version,
            metrics=metrics or {"loss": 0.25},
            step_seconds=1.0,
            wait_seconds=1.0,
            kept=list(kept),
        )
        return (await self.client.commit(news)).accepted


@asynccontextmanager
async def served(
    folder: Path,
    *,
    heldout: PromptSource | None = None,
    body_limit: int = 64 << 20,
    clock: Clock | None = None,
    hooks: Hooks | None = None,
    hook_timeout: float = 60.0,
    group_reward: GroupReward | None = None,
    reward_timeout: float = 60.0,
    keep: Bounds | None = None,
    **rules: object,
) -> AsyncIterator[Served]:
    hooks = hooks or Hooks(filters=[("zero_variance", ZeroVariance())])
    known = changed(RULES, group_reward=group_reward is not None, **rules)
    ledger = Ledger(folder / "ledger.sqlite", known, prompts(50), heldout, hooks=hooks, clock=clock)
    journal = Journal(folder / "metrics.jsonl")
    service = DataflowService(
        ledger, journal, TOKEN, body_limit=body_limit, clock=clock, hook_timeout=hook_timeout,
        group_reward=group_reward, reward_timeout=reward_timeout,
        keep=None if keep is None else (folder / FILE, keep),
    )  # fmt: skip
    found = Served(await service.start(), folder, ledger, service)
    await found.client.unit_beat(found.beat())
    try:
        yield found
    finally:
        await found.client.close()
        await service.stop()
        ledger.close()

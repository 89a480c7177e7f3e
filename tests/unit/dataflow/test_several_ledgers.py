"""Several ledgers of one run, each a real service, called as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from dataflow_server import TOKEN, Served, served

from dataflow_world import POLICY, RULES, changed, prompts
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect, split
from rillflow.dataflow.audit import AuditReport, audit_all
from rillflow.dataflow.balance import joined
from rillflow.dataflow.balance_ledger import read_balance
from rillflow.dataflow.episode_history import ended_steps, read_histories
from rillflow.dataflow.ledger.database import snapshot
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger_facts import read_ledger_facts
from rillflow.errors import DataError, LeaseLost
from rillflow.types import (
    OUT_OF_PROMPTS,
    Batch,
    BatchReply,
    CommitBatch,
    CompleteTask,
    Heartbeat,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    LeaveRun,
    RenewBatch,
    Row,
    SampleMeta,
    TaskLease,
    TrainerJoined,
    UnitBeat,
    UnitInfo,
)
from rillflow.types.runs import folder_of, ledger_of, owner_of

GROUPS = 4  # of a batch: two of each ledger


class Run:
    """Two services, and a node and a trainer that call them as one."""

    def __init__(self, parts: list[Served], client: DataflowClient) -> None:
        self.parts = parts
        self.client = client
        self.version = 0
        self.rows = 0

    async def lease(self, want: int = 100, wait: float = 0.0) -> list[TaskLease]:
        ask = LeaseTasks(node="n0", incarnation="a", want=want, versions={POLICY: self.version}, wait=wait)
        return (await self.client.lease_tasks(ask)).leases

    async def lease_all(self) -> list[TaskLease]:
        """Ask until no ledger has a task."""
        found: list[TaskLease] = []
        empty = 0
        while empty < 2 * len(self.parts):
            leases = await self.lease()
            found, empty = found + leases, 0 if leases else empty + 1
        return found

    def news(self, lease: TaskLease) -> CompleteTask:
        self.rows += 1
        sample = SampleMeta(
            policy=POLICY,
            row=Row(unit=f"u{ledger_of(lease.attempt)}", segment=0, offset=8 * self.rows, length=8),
            tokens=4,
            trained=4,
            oldest=self.version,
            newest=self.version,
            reward=float(lease.task.place),
        )
        return CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node="n0",
            reward=float(lease.task.place),
            samples=[sample],
            calls=1,
            seconds=0.1,
        )

    async def play(self) -> None:
        for lease in await self.lease_all():
            assert (await self.client.complete(self.news(lease))).accepted

    async def join(self, incarnation: str = "i", checkpoint: int = 0) -> TrainerJoined:
        return await self.client.join(JoinTrainer(policy=POLICY, incarnation=incarnation, checkpoint=checkpoint))

    async def ask(self, attempt: str, incarnation: str = "i") -> BatchReply:
        return await self.client.lease_batch(
            LeaseBatch(
                policy=POLICY, incarnation=incarnation, attempt=attempt, groups=GROUPS, version=self.version, wait=0.0
            )
        )

    async def commit(self, batch: Batch, version: int, incarnation: str = "i") -> bool:
        news = CommitBatch(
            policy=POLICY,
            incarnation=incarnation,
            batch=batch.id,
            attempt=batch.attempt,
            version=version,
            metrics={"loss": 0.5},
            step_seconds=1.0,
            wait_seconds=1.0,
        )
        taken = await self.client.commit(news)
        self.version = version
        return taken.accepted

    @property
    def heads(self) -> list[int]:
        return [part.head for part in self.parts]

    def audit(self) -> AuditReport:
        for part in self.parts:
            part.ledger.commit()
        return audit_all([part.ledger.db.path for part in self.parts])


@asynccontextmanager
async def several(folder: Path, **rules: object) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:
        parts = []
        for number in range(2):
            own = folder_of(folder, number)
            own.mkdir(parents=True, exist_ok=True)
            part = await stack.enter_async_context(served(own, ledger=number, ledgers=2, **rules))
            await part.client.unit_beat(UnitBeat(info=UnitInfo(unit=f"u{number}", path="")))
            parts.append(part)
        client = connect(",".join(part.url for part in parts), TOKEN)
        stack.push_async_callback(client.close)
        run = Run(parts, client)
        yield run
        report = run.audit()
        assert report.balanced, [identity for identity in report.identities if not identity.ok]


async def test_every_prompt_is_played_by_the_ledger_that_its_id_belongs_to(tmp_path: Path) -> None:
    async with several(tmp_path) as run:
        leases = await run.lease_all()
        assert {ledger_of(lease.attempt) for lease in leases} == {0, 1}
        assert all(owner_of(lease.task.prompt.id, 2) == ledger_of(lease.attempt) for lease in leases)
        assert len({lease.task.id for lease in leases}) == len(leases) == 2 * GROUPS
        for lease in leases:
            assert (await run.client.complete(run.news(lease))).accepted
        assert [part.ledger.shares.count(POLICY, "ready") for part in run.parts] == [2, 2]


async def test_a_node_never_leases_more_than_it_has_room_for(tmp_path: Path) -> None:
    async with several(tmp_path, staleness=4) as run:
        held = 0
        for room in (1, 3, 2, 5):
            leases = await run.lease(room)
            assert len(leases) <= room
            held += len(leases)
        assert sum(part.ledger.tasks.running for part in run.parts) >= held


async def test_a_step_is_in_every_ledger_and_told_once_as_a_whole(tmp_path: Path) -> None:
    async with several(tmp_path) as run:
        await run.join()
        await run.play()
        batch = (await run.ask("a1")).batch
        assert batch is not None
        assert (batch.groups, batch.complete) == (GROUPS, True)
        assert sorted({sample.member for sample in batch.samples}) == [0, 1, 2, 3]
        again = (await run.ask("a1")).batch
        assert again is not None
        assert (again.id, again.samples) == (batch.id, batch.samples)
        assert (await run.client.renew_batch(RenewBatch(batch=batch.id, attempt="a1"))).accepted
        assert await run.commit(batch, 1)
        assert await run.commit(batch, 1), "told again, it was taken before"
        assert run.heads == [1, 1]
        run.parts[0].ledger.commit()
        (line,) = [line for _, line in run.parts[0].ledger.events_after(0) if line.get("step") == 1]
        assert (line["samples"], line["tokens"], line["reward"]) == (8, 32, 0.5)
        assert line["counters"]["trained"] == GROUPS
        counts = run.audit().counts
        assert (counts["steps"], counts["train.trained"]) == (1, GROUPS)


async def test_the_history_and_the_balance_are_those_of_all_ledgers(tmp_path: Path) -> None:
    async with several(tmp_path) as run:
        await run.join()
        await run.play()
        batch = (await run.ask("a1")).batch
        assert batch is not None
        assert await run.commit(batch, 1)
        for part in run.parts:
            part.ledger.commit()
        paths = [part.ledger.db.path for part in run.parts]
        history = read_histories(paths, 1000)
        (step,) = history.steps
        assert (step.batch, step.version, step.groups, step.samples, step.reward) == (batch.id, 1, GROUPS, 8, 0.5)
        trained = [one for one in history.episodes if history.batches_of.get(one.group) == [batch.id]]
        assert sorted(one.id for one in trained) == sorted(sample.task for sample in batch.samples)
        assert history.episodes == sorted(history.episodes, key=lambda one: one.begin)
        assert history.episodes_in_all == len(history.episodes)
        assert len(read_histories(paths, 3).episodes) == 3
        with snapshot(paths[0]) as first, snapshot(paths[1]) as second:
            ((sent, episodes),) = ended_steps([first, second], 0.0, 10)
        assert (sent, len(episodes)) == (step, 8)
        told = joined((await run.client.balance()).ledgers).current
        assert (told.production.consumed, told.production.entered, told.production.gpus) == (8, 8, 1)
        assert [(node.id, node.accepted) for node in told.nodes] == [("n0", 8)]
        facts = read_ledger_facts(paths)
        assert (facts.groups["trained"], facts.completed, facts.samples[POLICY].count) == (GROUPS, 8, 8)
        assert [(node.name, node.completed) for node in facts.nodes] == [("n0", 8)]
        kept = read_balance(paths, POLICY).current
        assert (kept.production.consumed, kept.nodes[0].accepted) == (8, 8)


async def test_the_balance_lines_are_of_all_ledgers(tmp_path: Path) -> None:
    async with several(tmp_path, balance_every=1) as run:
        await run.join()
        await run.play()
        batch = (await run.ask("a1")).batch
        assert batch is not None
        assert await run.commit(batch, 1)
        first = run.parts[0].ledger
        first.commit()
        (line,) = [line for _, line in first.events_after(0) if line.get("event") == "balance"]
        assert (line["production"]["produced"], line["production"]["consumed"]) == (8, 8)
        assert [(node["id"], node["accepted"]) for node in line["nodes"]] == [("n0", 8)]
        own = first.balances.latest()
        assert own is not None
        assert own.production.consumed == 4, "each ledger keeps the report of its own part"


async def test_a_ledger_that_is_down_delays_only_its_own_tasks(tmp_path: Path) -> None:
    async with several(tmp_path, staleness=4) as run:
        leases: list[TaskLease] = []
        while {ledger_of(lease.attempt) for lease in leases} != {0, 1}:
            leases += await run.lease(4)
        await run.parts[1].service.stop()
        other = next(lease for lease in leases if ledger_of(lease.attempt) == 1)
        late = asyncio.create_task(run.client.complete(run.news(other)))
        for lease in leases:
            if ledger_of(lease.attempt) == 0:
                assert (await run.client.complete(run.news(lease))).accepted
        # The other ledger may have answered a question before it stopped.
        while 0 not in {ledger_of(lease.attempt) for lease in await run.lease(4)}:
            pass
        beat = Heartbeat(node="n0", incarnation="a", attempts=[other.attempt], versions={POLICY: 0}, capacity=8)
        assert (await run.client.heartbeat(beat)).lost == [], "nobody has said that it is lost"
        assert not late.done(), "its end is told until its ledger is back"
        late.cancel()


async def test_a_heartbeat_names_to_each_ledger_its_own_attempts(tmp_path: Path) -> None:
    async with several(tmp_path) as run:
        held = [lease.attempt for lease in await run.lease_all()]
        beat = Heartbeat(
            node="n0", incarnation="a", attempts=[*held, "t9.0-1", "l1-t9.0-1"], versions={POLICY: 0}, capacity=8
        )
        assert sorted((await run.client.heartbeat(beat)).lost) == ["l1-t9.0-1", "t9.0-1"]
        (node,) = (await run.client.nodes()).nodes
        assert (node.name, node.held) == ("n0", len(held))
        await run.client.leave(LeaveRun(node="n0", incarnation="a"))
        assert [part.ledger.tasks.running for part in run.parts] == [0, 0]


async def test_a_part_that_is_lost_before_its_commit_is_made_whole_by_the_next_trainer(tmp_path: Path) -> None:
    async with several(tmp_path) as run:
        await run.join()
        await run.play()
        batch = (await run.ask("a1")).batch
        assert batch is not None
        run.parts[0].ledger.batches.release_all("lease_expired")
        with pytest.raises(LeaseLost):
            await run.commit(batch, 1)
        assert run.heads == [0, 1], "the other ledger had committed its part"
        joined = await run.join("j")
        assert (joined.highest, joined.orphaned, joined.rolled_back) == (1, [1], 2)
        assert run.heads == [0, 0]
        run.version = 0
        await run.play()
        again = (await run.ask("b1", "j")).batch
        assert again is not None
        assert {sample.group for sample in again.samples} == {sample.group for sample in batch.samples}
        assert await run.commit(again, joined.highest + 1, "j")


async def test_the_run_ends_when_no_ledger_has_prompts_left(tmp_path: Path) -> None:
    """The ledgers have other numbers of prompts: the last steps are made of what one of them has."""
    async with several(tmp_path, epochs=1) as run:
        await run.join()
        numbers = []
        while True:
            await run.play()
            reply = await run.ask(f"a{run.version}")
            if reply.batch is None:
                break
            numbers.append(reply.batch.groups)
            assert await run.commit(reply.batch, run.version + 1)
        assert reply.phase != "training"
        status = await run.client.status()
        assert (status.phase, status.reason, status.steps) == ("ended", OUT_OF_PROMPTS, len(numbers))
        assert sum(numbers) == status.counts["trained"] == 50
        assert len(set(numbers)) > 1, "one ledger has run out before the other"
        assert run.heads == [len(numbers)] * 2
        audited = run.audit().counts
        assert (audited["steps"], audited["train.trained"], audited["train.admitted"]) == (len(numbers), 50, 50)


async def test_the_status_is_the_sum_and_units_say_whose_they_are(tmp_path: Path) -> None:
    async with several(tmp_path) as run:
        leases = await run.lease_all()
        status = await run.client.status()
        assert status.counts["tasks.leased"] == len(leases) == 2 * GROUPS
        assert (status.nodes, status.phase) == (1, "training")
        units = (await run.client.units()).units
        assert {(info.unit, info.ledger) for info in units} >= {("u0", 0), ("u1", 1)}
        await run.join()
        run.parts[1].ledger.stop("too many failures")
        status = await run.client.status()
        assert (status.phase, status.reason) == ("finishing", "too many failures")
        assert (await run.ask("a1")).phase == "ended", "the trainer goes on with neither"
        await run.client.stop(status.reason)
        status = await run.client.status()
        assert (status.phase, status.reason) == ("ended", "too many failures")


def test_a_ledger_keeps_its_number(make_world) -> None:
    world = make_world(ledger=1, ledgers=2)
    world.ledger.commit()
    for other in ({"ledger": 0, "ledgers": 2}, {"ledger": 1, "ledgers": 3}):
        with pytest.raises(DataError, match="ledger 1 of 2"):
            Ledger(world.path, changed(RULES, **other), prompts(50))


def test_a_ledger_without_prompts_is_refused(tmp_path: Path) -> None:
    rules = changed(RULES, ledger=1 - owner_of("p0", 2), ledgers=2)
    with pytest.raises(DataError, match="none of the 1 prompts"):
        Ledger(tmp_path / "ledger.sqlite", rules, prompts(1))


@pytest.mark.parametrize(
    ("room", "had", "shares"),
    [
        (8, [True, True], [4, 4]),
        (9, [True, True], [5, 4]),
        (8, [False, True], [1, 7]),
        (8, [False, False], [4, 4]),
        (1, [False, True], [1, 0]),
        (0, [True, True], [0, 0]),
        (-3, [True], [0]),
    ],
)
def test_room_is_divided_among_ledgers(room: int, had: list[bool], shares: list[int]) -> None:
    assert split(room, had) == shares


def test_prompts_are_divided_evenly_and_alike_everywhere() -> None:
    owners = [owner_of(f"p{n}", 4) for n in range(4000)]
    assert owners[:8] == [1, 0, 0, 1, 1, 1, 0, 0]
    assert all(900 < owners.count(ledger) < 1100 for ledger in range(4))

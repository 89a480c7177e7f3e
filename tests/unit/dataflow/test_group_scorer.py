"""The service asks a group's reward about complete groups, with what their episodes left in a real storage unit."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dataflow_server import Served, served

from dataflow_world import POLICY
from rillflow.agents.rewards.base import GroupSum, Part
from rillflow.dataflow import group_rewards
from rillflow.dataflow.audit import audit
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.types import CompleteTask, FinishedEpisode, SampleMeta, TaskLease, UnitBeat

Group = Sequence[FinishedEpisode]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_rewards, "FIRST_PAUSE", 0.01)


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[FileUnit]:
    found = FileUnit(tmp_path / "unit")
    yield found
    found.close()


def of(*rewards: Callable[..., Any]) -> GroupSum:
    return GroupSum([Part(reward.__name__, 1.0, reward) for reward in rewards])


async def finish(run: Served, unit: FileUnit, lease: TaskLease, answer: Any, *, damaged: bool = False) -> None:
    """Complete a task as a node does: what the episode left goes to the unit first."""
    said = [{"policy": POLICY, "messages": [{"role": "assistant", "content": str(answer)}]}]
    columns = {"transcript": json.dumps(said).encode(), "answer": json.dumps(answer).encode()}
    (row,) = unit.put([columns])
    if damaged:
        row = msgspec.structs.replace(row, offset=row.offset + 1)
    sample = SampleMeta(policy=POLICY, row=row, tokens=4, trained=4, oldest=0, newest=0, reward=0.0)
    news = CompleteTask(
        task=lease.task.id, attempt=lease.attempt, node="n0", reward=0.0, samples=[sample], calls=1, seconds=0.5,
        metrics={"turns": float(lease.task.place)},
    )  # fmt: skip
    assert (await run.client.complete(news)).accepted


async def play(run: Served, unit: FileUnit, answers: Sequence[Any] = ("long", "a")) -> str:
    await run.client.unit_beat(UnitBeat(info=unit.info()))
    leases = (await run.lease(len(answers))).leases
    for lease, answer in zip(leases, answers, strict=True):
        await finish(run, unit, lease, answer)
    return leases[0].task.group


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is a state, not an event
            await asyncio.sleep(0.01)


def state(run: Served, group: str) -> str:
    return str(run.ledger.groups.row(group).state)


async def test_it_is_given_every_episode_with_what_it_left(tmp_path: Path, unit: FileUnit) -> None:
    seen: list[list[FinishedEpisode]] = []

    def shortest(group: Group) -> list[float]:
        seen.append(list(group))
        least = min(len(one.answer) for one in group)
        return [float(len(one.answer) == least) for one in group]

    async with served(tmp_path, group_reward=of(shortest), batch_groups=1) as run:
        await run.join()
        group = await play(run, unit)
        batch = (await run.ask("a", wait=60)).batch
        assert batch is not None
        assert [one.reward for one in batch.samples] == [0.0, 1.0]
        assert {one.group for one in batch.samples} == {group}
    ((first, second),) = seen
    assert (first.payload, first.answer, second.answer) == ({"n": 0}, "long", "a")
    assert first.messages == [{"role": "assistant", "content": "long"}]
    assert (second.metrics, second.episode.task, second.episode.seconds) == ({"turns": 1.0}, f"{group}.1", 0.5)
    assert audit(tmp_path / "ledger.sqlite").balanced


async def test_nobody_waits_for_a_slow_reward(tmp_path: Path, unit: FileUnit) -> None:
    go = threading.Event()

    def slow(group: Group) -> list[float]:
        assert go.wait(60)
        return [1.0, 0.0]

    async with served(tmp_path, group_reward=of(slow), batch_groups=1) as run:
        await run.join()
        group = await play(run, unit)  # acknowledged, and the loop serves others
        await run.waits_for(lambda waits: any("reward of 1 groups is being computed" in wait for wait in waits))
        assert state(run, group) == "playing"
        go.set()
        assert (await run.ask("a", wait=60)).batch is not None


async def test_an_error_that_passes_costs_nothing(tmp_path: Path, unit: FileUnit) -> None:
    calls: list[int] = []

    async def once(group: Group) -> list[float]:
        calls.append(len(group))
        if len(calls) < 3:
            raise ConnectionError("the judge is away")
        return [1.0, 0.0]

    async with served(tmp_path, group_reward=of(once), batch_groups=1) as run:
        group = await play(run, unit)
        await until(lambda: state(run, group) == "open")
    assert calls == [2, 2, 2]


async def test_one_that_stays_fails_the_episodes_with_the_line_once(
    tmp_path: Path, unit: FileUnit, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(group: Group) -> list[float]:
        return [1 / len(one.answer.strip("a")) for one in group]  # the reported line

    with caplog.at_level(logging.WARNING, "rillflow.dataflow.group_rewards"):
        async with served(tmp_path, group_reward=of(broken), batch_groups=1) as run:
            group = await play(run, unit)
            await until(lambda: state(run, group) == "failed")
            assert "test_group_scorer.py" in str(run.ledger.db.meta("last_failure"))
    first, *others = (record.getMessage() for record in caplog.records if "has no reward" in record.getMessage())
    assert "# the reported line" in first
    assert len(others) == 2
    assert "(3 times so far" in others[1]
    assert audit(tmp_path / "ledger.sqlite").balanced


async def test_one_that_hangs_has_a_deadline(tmp_path: Path, unit: FileUnit) -> None:
    go = threading.Event()

    def hangs(group: Group) -> list[float]:
        go.wait(60)
        return [0.0, 0.0]

    async with served(tmp_path, group_reward=of(hangs), reward_timeout=0.05, batch_groups=1) as run:
        group = await play(run, unit)
        await until(lambda: state(run, group) == "failed")
        assert "took longer than 0 s" in str(run.ledger.db.meta("last_failure"))
    go.set()


async def test_rows_that_are_gone_are_played_again(tmp_path: Path, unit: FileUnit) -> None:
    def same(group: Group) -> list[float]:
        return [float(n) for n in range(len(group))]

    async with served(tmp_path, group_reward=of(same), batch_groups=1) as run:
        await run.client.unit_beat(UnitBeat(info=unit.info()))
        first, second = (await run.lease(2)).leases
        await finish(run, unit, first, "a")
        await finish(run, unit, second, "b", damaged=True)
        await until(lambda: run.ledger.tasks.pending == 1)
        (again,) = (await run.lease(1)).leases
        assert again.task.id == second.task.id
        await finish(run, unit, again, "b")
        await until(lambda: state(run, first.task.group) == "open")


async def test_a_service_that_comes_after_asks_again(tmp_path: Path, unit: FileUnit) -> None:
    stuck, reward = threading.Event(), of

    def never(group: Group) -> list[float]:
        stuck.wait(60)
        raise AssertionError("the service is gone")

    async with served(tmp_path, group_reward=reward(never), batch_groups=1) as run:
        group = await play(run, unit)
    stuck.set()

    def ranks(group: Group) -> list[float]:
        return [float(n) for n in range(len(group))]

    async with served(tmp_path, group_reward=reward(ranks), batch_groups=1) as run:
        await run.client.unit_beat(UnitBeat(info=unit.info()))
        await until(lambda: state(run, group) == "open")
        found = run.ledger.db.all("SELECT reward FROM tasks WHERE grp = ? ORDER BY place", (group,))
        assert [row["reward"] for row in found] == [0.0, 1.0]

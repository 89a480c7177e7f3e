"""The service keeps episodes of each step, of each evaluation and of failures, read from a real storage unit."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from dataflow_server import Served, served
from hypothesis import given
from hypothesis import strategies as st

import rillflow
from dataflow_world import POLICY, RULES, changed, prompts
from kept_trajectories import token_path, trajectory
from rillflow.dataflow import trajectory_keeper
from rillflow.dataflow.kept_episodes import KeptEpisode, KeptSample, chosen, marked
from rillflow.dataflow.storage_unit import FileUnit
from rillflow.dataflow.trajectory_keeper import of_samples
from rillflow.storage.trajectories import LEAST_BYTES, Bounds, Trajectories
from rillflow.storage.trajectory_format import FILE, KINDS, encode_body
from rillflow.types import (
    Batch,
    CompleteTask,
    FailTask,
    KeptTokens,
    LeaseBatch,
    Prompt,
    Row,
    SampleMeta,
    TaskLease,
    UnitBeat,
)

WIDE = Bounds(bytes=4 << 20, most=dict.fromkeys(KINDS, 100))
KEEPS: dict[str, Any] = {"keep": WIDE, "kept_per_step": 1, "kept_extremes": True, "kept_per_evaluation": 2}
LENGTH, PROMPT = 8, 3


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[FileUnit]:
    found = FileUnit(tmp_path / "unit")
    yield found
    found.close()


def columns(lease: TaskLease, *, transcript: bool = True) -> dict[str, Any]:
    """Return what an episode leaves: its tokens say which task it was of."""
    mask = np.arange(LENGTH) >= PROMPT
    said = [
        {"policy": POLICY, "follows": None, "shared": 0, "fork": "", "finish": "stop", "messages": [
            {"role": "assistant", "content": f"I am {lease.task.id}."},
        ]}
    ]  # fmt: skip
    return {
        "tokens": np.full(LENGTH, lease.task.seed % 1000, "<i4"),
        "mask": mask.astype("|u1"),
        "logprobs": np.where(mask, -0.5, 0).astype("<f4"),
        "raw_logprobs": np.where(mask, -0.25, 0).astype("<f4"),
        "temperatures": np.where(np.arange(LENGTH) == LENGTH - 1, 0, mask).astype("<f4"),
        "versions": np.where(mask, 2, -1).astype("<i4"),
        **({"transcript": json.dumps(said).encode()} if transcript else {}),
    }


async def finish(run: Served, unit: FileUnit, lease: TaskLease, *, reward: float | None = None) -> None:
    (row,) = unit.put([columns(lease)])
    reward = float(lease.task.place) if reward is None else reward
    sample = SampleMeta(
        policy=POLICY, row=row, tokens=LENGTH, trained=LENGTH - PROMPT, oldest=run.head,
        newest=run.head, reward=reward,
        truncated=lease.task.place == 0, agent="solver",
    )  # fmt: skip
    news = CompleteTask(
        task=lease.task.id, attempt=lease.attempt, node="n0", reward=reward, samples=[sample], calls=3, seconds=0.5,
        metrics={"turns": 2.0},
    )  # fmt: skip
    assert (await run.client.complete(news)).accepted


async def batch(run: Served, unit: FileUnit, tasks: int = 4) -> Batch:
    """Play a batch of two groups."""
    await run.client.unit_beat(UnitBeat(info=unit.info()))
    await run.join()
    for lease in (await run.lease(tasks)).leases:
        await finish(run, unit, lease)
    found = (await run.ask("a")).batch
    assert found is not None
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is a state, not an event
            await asyncio.sleep(0.01)


def counted(run: Served, result: str) -> float:
    return run.service.registry.get_sample_value("rillflow_trajectories_total", {"result": result}) or 0.0


def told(batch: Batch, tasks: Sequence[str]) -> list[KeptTokens]:
    """Return what a trainer computes for the trained tokens of these tasks."""
    at = np.arange(PROMPT, LENGTH, dtype="<i4")
    return [
        KeptTokens(
            member=sample.member, place=int(sample.id.split(".")[1]), number=0, at=at.tobytes(),
            advantages=np.full(len(at), 1.5, "<f4").tobytes(), logprobs=np.full(len(at), -0.5, "<f4").tobytes(),
        )
        for sample in batch.samples
        if sample.task in tasks
    ]  # fmt: skip


def kept(folder: Path, **filters: Any) -> Trajectories:
    (folder / "recipe.yaml").touch()
    return rillflow.trajectories(folder, **filters)


# ------------------------------------------------------------ steps


async def test_of_a_step_are_kept_one_drawn_the_best_and_the_worst(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path, **KEEPS) as run:
        found = await batch(run, unit)
        assert set(found.keep) <= {sample.task for sample in found.samples}
        assert await run.commit(found, 1, kept=told(found, found.keep))
        await until(lambda: counted(run, "kept") == len(kept(tmp_path)) == 3)
    infos = {info.kept: info for info in kept(tmp_path).infos()}
    assert (infos["best"].reward, infos["worst"].reward) == (1.0, 0.0)
    best = infos["best"]
    assert (best.step, best.lane, best.status, best.node, best.calls, best.seconds) == (
        1,
        "train",
        "done",
        "n0",
        3,
        0.5,
    )
    assert (best.prompt, best.group, best.roles) == (f"p{int(best.group[1:])}", best.id.split(".")[0], ["solver"])
    assert (best.tokens, best.trained, best.samples, best.oldest, best.truncated) == (8, 5, 1, 2, False)
    assert infos["worst"].truncated
    assert best.advantage == 1.5
    one = kept(tmp_path).get(best.id)
    assert one.messages() == [{"role": "assistant", "content": f"I am {best.id}."}]
    assert (one.rewards, one.samples[0].path) == ({"turns": 2.0}, 0)
    (path,) = one.samples
    np.testing.assert_array_equal(path.logprobs, np.float32([0, 0, 0, -0.5, -0.5, -0.5, -0.5, -0.25]))
    assert path.advantages is not None
    np.testing.assert_array_equal(np.isnan(path.advantages), path.mask == 0)
    assert best.gap == pytest.approx(0.05)


async def test_nothing_is_kept_where_the_recipe_wants_none(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path) as run:
        found = await batch(run, unit)
        assert found.keep == []
        assert await run.commit(found, 1)
    assert not (tmp_path / FILE).exists()


async def test_what_a_trainer_tells_that_does_not_fit_costs_one_trajectory(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path, **KEEPS) as run:
        found = await batch(run, unit)
        said = [msgspec.structs.replace(one, at=np.int32([99] * 5).tobytes()) for one in told(found, found.keep[:1])]
        assert await run.commit(found, 1, kept=said)
        await until(lambda: counted(run, "refused") + counted(run, "kept") == 3)
        assert counted(run, "refused") <= 1
        assert "does not fit" in (await run.client.status()).notes.get("trajectories", "does not fit")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), min_size=1), st.integers(0, 4))
def test_what_is_kept_of_a_batch_was_marked_in_its_parts(found: list[tuple[int, int, int]], per_step: int) -> None:
    rules = changed(RULES, kept_per_step=per_step, kept_extremes=True)
    rows: list[Any] = [
        SimpleNamespace(grp=f"g{group}", place=place, reward=float(reward), part=group)
        for group, place, reward in sorted({(group, place): one for one in found for group, place, _ in [one]}.values())
    ]
    whole = {f"{row.grp}.{row.place}": row.reward for row in rows}
    kinds = chosen(whole, rules)
    assert set(kinds) <= marked(rows, rules)
    extremes = 2 if len(set(whole.values())) > 1 else 0
    assert list(kinds.values()).count("sample") == min(per_step, len(whole) - extremes)
    if len(set(whole.values())) > 1:
        (best,) = [task for task, kind in kinds.items() if kind == "best"]
        assert whole[best] == max(whole.values())
    assert chosen(whole, rules) == kinds


async def test_ranks_are_told_of_their_own_tasks(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path, **KEEPS) as run:
        whole = await batch(run, unit)
        parts = []
        for rank in range(2):
            ask = LeaseBatch(
                policy=POLICY, incarnation="i", attempt="a", groups=2, version=0, wait=0.0, rank=rank, ranks=2
            )  # fmt: skip
            reply = (await run.client.lease_batch(ask)).batch
            assert reply is not None
            assert set(reply.keep) <= {sample.task for sample in reply.samples}
            parts += reply.keep
        assert sorted(parts) == whole.keep


def test_two_trainers_tell_of_one_episode() -> None:
    """Each trainer reports its own policy's samples: the later one adds to the earlier report."""
    samples = [
        KeptSample(policy, Row(unit="u", segment=0, offset=n, length=1), 1.0, False, "", None)
        for n, policy in enumerate(("a", "b"))
    ]
    row = {
        "tokens": np.arange(4, dtype="<i4"),
        "mask": np.ones(4, "|u1"),
        "logprobs": np.zeros(4, "<f4"),
        "raw_logprobs": np.zeros(4, "<f4"),
        "temperatures": np.ones(4, "<f4"),
        "versions": np.zeros(4, "<i4"),
    }
    known: dict[str, Any] = {
        "id": "g0.0", "kept": "sample", "lane": "train", "group": "g0", "place": 0, "time": 0.0,
        "prompt": Prompt(id="p", payload={}),
    }  # fmt: skip
    four = np.arange(4, dtype="<i4").tobytes()
    ones = np.ones(4, "<f4").tobytes()
    one = KeptTokens(member=0, place=0, number=0, at=four, advantages=ones, logprobs=ones)
    first = of_samples(KeptEpisode(**known, samples=[replace(samples[0], told=one), samples[1]]), [row, row])
    second = of_samples(
        KeptEpisode(**known, samples=[samples[0], replace(samples[1], told=one)]), [row, row], first.samples
    )
    assert [sample.advantages is None for sample in first.samples] == [False, True]
    assert [sample.advantages is None for sample in second.samples] == [False, False]


# ------------------------------------------------------------ evaluations and failures


async def test_of_an_evaluation_the_same_prompts_are_kept_each_time(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path, heldout=prompts(5, "h"), evaluate_every=1, **KEEPS) as run:
        await run.client.unit_beat(UnitBeat(info=unit.info()))
        await run.join()
        for version in (1, 2):
            while run.ledger.evaluations.running:
                for lease in (await run.lease(1)).leases:
                    await finish(run, unit, lease)
            await until(lambda version=version: len(kept(tmp_path, kept="evaluation")) == 2 * version)
            for lease in (await run.lease(4)).leases:
                await finish(run, unit, lease)
            found = (await run.ask(f"a{version}")).batch
            assert found is not None
            assert await run.commit(found, version)
    infos = kept(tmp_path, lane="evaluation").infos("time")
    assert [info.step for info in infos] == [0, 0, 1, 1]
    assert {info.prompt for info in infos[:2]} == {info.prompt for info in infos[2:]}


async def test_a_failed_episode_is_kept_with_what_its_node_has_sent(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path, **KEEPS) as run:
        await run.join()
        first, second = (await run.lease(2)).leases
        body = encode_body(replace(trajectory(samples=[token_path(6)]), error="Traceback: no such tool"))
        news = FailTask(
            task=first.task.id, attempt=first.attempt, node="n0", cause="tool_error", error="no such tool",
            trajectory=body, calls=4,
        )  # fmt: skip
        for _ in range(2):  # as when an answer was lost
            assert (await run.client.fail(news)).accepted
        broken = msgspec.structs.replace(
            news, task=second.task.id, attempt=second.attempt, trajectory=b"no body at all"
        )
        assert (await run.client.fail(broken)).accepted
        await until(lambda: counted(run, "kept") == 2 and counted(run, "refused") == 1)
    (info,) = kept(tmp_path, status="failed").infos()
    assert (info.id, info.kept, info.cause, info.calls) == (first.attempt, "failure", "tool_error", 4)
    assert (info.group, info.reward, info.samples) == (first.task.group, None, 1)
    found = kept(tmp_path).get(info.id)
    assert found.error == "Traceback: no such tool"
    assert found.payload == first.task.prompt.payload


# ------------------------------------------------------------ faults


async def test_rows_that_are_gone_are_counted(tmp_path: Path, unit: FileUnit) -> None:
    async with served(tmp_path, **KEEPS) as run:
        found = await batch(run, unit)
        for segment in (tmp_path / "unit").glob("*.seg*"):
            segment.unlink()
        assert await run.commit(found, 1)
        await until(lambda: counted(run, "unread") >= 2)
        assert "not kept" in (await run.client.status()).notes["trajectories"]
    assert not (tmp_path / FILE).exists()


async def test_a_file_that_cannot_be_written_costs_no_step(
    tmp_path: Path, unit: FileUnit, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with caplog.at_level(logging.WARNING):
        async with served(tmp_path, **KEEPS) as run:
            found = await batch(run, unit)
            assert await run.commit(found, 1)
            await until(lambda: counted(run, "refused") >= 2)
            assert "is damaged" in (await run.client.status()).notes["trajectories"]
    assert len([record for record in caplog.records if "trajectories are not kept" in record.message]) == 1


async def test_a_disk_that_hangs_holds_up_nobody(
    tmp_path: Path, unit: FileUnit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded; further steps are dropped and counted."""
    monkeypatch.setattr(trajectory_keeper, "CLOSE_DEADLINE", 0.01)
    go = asyncio.Event()

    async def hangs(self: Any, episode: Any) -> str:
        await go.wait()
        return "kept"

    monkeypatch.setattr(trajectory_keeper.TrajectoryKeeper, "_keep", hangs)
    async with served(tmp_path, batch_groups=1, staleness=3, **KEEPS) as run:
        await run.client.unit_beat(UnitBeat(info=unit.info()))
        await run.join()
        keeper = run.service._keeper
        assert keeper is not None
        keeper._waiting = asyncio.Queue(2)
        for version in range(1, 5):
            for lease in (await run.lease(2)).leases:
                await finish(run, unit, lease)
            found = (await run.ask(f"a{version}")).batch
            assert found is not None
            assert await run.commit(found, version)
        assert counted(run, "dropped") >= 2


async def test_one_that_is_too_large_is_counted(tmp_path: Path, unit: FileUnit) -> None:
    small = Bounds(bytes=LEAST_BYTES, most={"failure": 5})
    async with served(tmp_path, keep=small) as run:
        await run.join()
        (lease,) = (await run.lease(1)).leases
        body = encode_body(trajectory(samples=[token_path(200_000)]))
        news = FailTask(
            task=lease.task.id, attempt=lease.attempt, node="n0", cause="x", error="x", trajectory=body
        )  # fmt: skip
        assert (await run.client.fail(news)).accepted
        await until(lambda: counted(run, "no room") == 1)

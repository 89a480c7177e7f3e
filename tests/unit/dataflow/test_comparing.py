"""A sample is compared with its policy's episodes, its agent's samples, or those of the same turn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataflow_world import World, sample
from rillflow.errors import BadRequest
from rillflow.trainer.algorithms.advantages import Groups
from rillflow.types import BatchSample, SampleMeta, TaskLease

# agent, turn, reward of each sample of the two episodes: the writer's rewards are ten times the critic's.
Said = list[tuple[str, int, float]]
FIRST = [("writer", 0, 10.0), ("critic", 0, 1.0), ("writer", 1, 30.0)]
SECOND = [("writer", 0, 20.0), ("critic", 0, 2.0), ("writer", 1, 30.0)]


def samples(world: World, lease: TaskLease, said: Said) -> list[SampleMeta]:
    row = world.row_of(lease.attempt)
    return [
        msgspec.structs.replace(sample(0, row=row), agent=agent, turn=turn, reward=reward)
        for agent, turn, reward in said
    ]


def played(folder: Path, grouping: str, first: Said = FIRST, second: Said = SECOND) -> World:
    folder.mkdir(exist_ok=True)
    world = World(folder, grouping=grouping, batch_groups=1)
    leases = sorted(world.lease(2), key=lambda lease: lease.task.place)
    for lease, said in zip(leases, (first, second), strict=True):
        world.done(lease, reward=1.0, samples=samples(world, lease, said))
    return world


def statistics(batch_samples: list[BatchSample]) -> dict[tuple[str, int], tuple[float, float, int]]:
    return {(s.agent, s.turn): (s.group_mean, s.group_std, s.group_size) for s in batch_samples}


def test_all_samples_of_a_policy_are_compared_by_default(tmp_path: Path) -> None:
    found = statistics(played(tmp_path, "policy").batch().samples)
    means = [np.mean([r for *_, r in said]) for said in (FIRST, SECOND)]
    assert all(one == pytest.approx((np.mean(means), np.std(means), 2)) for one in found.values())


def test_each_agent_is_compared_with_itself(tmp_path: Path) -> None:
    world = played(tmp_path, "agent")
    found = statistics(world.batch().samples)
    writer = [10.0, 30.0, 20.0, 30.0]
    assert found["writer", 0] == found["writer", 1] == pytest.approx((np.mean(writer), np.std(writer), 4))
    assert found["critic", 0] == pytest.approx((1.5, 0.5, 2))
    world.check()


def test_turns_are_compared_with_the_same_turn(tmp_path: Path) -> None:
    found = statistics(played(tmp_path, "turn").batch().samples)
    assert found["writer", 0] == pytest.approx((15.0, 5.0, 2))
    assert found["writer", 1] == pytest.approx((30.0, 0.0, 2))


def test_states_are_compared_with_the_answers_to_the_same_call(tmp_path: Path) -> None:
    several = [("planner", 0, 1.0), ("planner", 0, 3.0), ("planner", 1, 5.0), ("planner", 1, 5.0)]
    batch = played(tmp_path, "state", several, [("planner", 0, 9.0), ("planner", 0, 7.0)]).batch().samples
    found = {(s.task.rpartition(".")[2], s.turn): (s.group_mean, s.group_std, s.group_size) for s in batch}
    assert found == {("0", 0): (2.0, 1.0, 2), ("0", 1): (5.0, 0.0, 2), ("1", 0): (8.0, 1.0, 2)}
    assert len({(s.task.rpartition(".")[2], s.alike) for s in batch}) == 3


@pytest.mark.parametrize("grouping", ["agent", "turn"])
def test_it_is_the_grouping_of_the_algorithms(tmp_path: Path, grouping: str) -> None:
    """Dr. MAS compares an agent with itself, AT-GRPO an agent's turn with the same turn of other episodes."""
    batch = played(tmp_path, grouping).batch().samples
    rewards = np.array([s.reward for s in batch])
    named = [(s.group, s.agent) if grouping == "agent" else (s.group, s.agent, s.turn) for s in batch]
    keys = np.array([sorted(set(named)).index(name) for name in named])
    theirs = Groups.of(rewards, keys)
    assert np.allclose([s.group_mean for s in batch], theirs.mean_R)
    assert np.allclose([s.group_std for s in batch], theirs.std_R)
    assert [s.group_size for s in batch] == theirs.size_R.tolist()
    alike = [s.alike for s in batch]
    assert [[a == b for a in alike] for b in alike] == (keys[:, None] == keys[None]).tolist()


def test_ranks_have_the_statistics_of_all_samples(tmp_path: Path) -> None:
    world = played(tmp_path, "agent")
    parts = [world.ask("a", rank=rank, ranks=3).batch for rank in range(3)]
    found = [statistics(part.samples) for part in parts if part is not None]
    assert sum(len(part.samples) for part in parts if part is not None) == 6
    assert all(one["critic", 0] == pytest.approx((1.5, 0.5, 2)) for one in found if ("critic", 0) in one)


def test_a_group_is_flat_only_if_nothing_in_it_differs_from_its_like(tmp_path: Path) -> None:
    same = [("writer", 0, 3.0), ("critic", 0, 1.0)]
    swapped = [("writer", 0, 1.0), ("critic", 0, 3.0)]
    assert played(tmp_path / "a", "policy", same, swapped).check()["train.filtered"] == 1  # equal means
    assert played(tmp_path / "b", "agent", same, swapped).check().get("train.filtered", 0) == 0
    assert played(tmp_path / "c", "agent", same, same).check()["train.filtered"] == 1


def test_an_agent_alone_is_a_group_of_one(tmp_path: Path) -> None:
    found = statistics(played(tmp_path, "agent", [*FIRST, ("guest", 0, 7.0)]).batch().samples)
    assert found["guest", 0] == (7.0, 0.0, 1)


@pytest.mark.parametrize(("agent", "turn"), [("x" * 101, 0), ("a", -1)])
def test_names_and_turns_have_bounds(tmp_path: Path, agent: str, turn: int) -> None:
    world = World(tmp_path, grouping="agent")
    (lease,) = world.lease(1)
    with pytest.raises(BadRequest):
        world.done(lease, samples=samples(world, lease, [(agent, turn, 1.0)]))

"""A group whose recipe has a group's reward is settled with it: once, in one transition, and never without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dataflow_world import World, changed, prompts, sample
from rillflow.dataflow.audit import audit
from rillflow.types import Row, Scored

MakeWorld = Callable[..., World]


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(group_reward=True, batch_groups=1, total_steps=50)


def numbers(*values: float) -> list[Scored]:
    return [Scored(value, {"rank": value}) for value in values]


def play(world: World, *, groups: int = 1) -> list[str]:
    """Play `count` groups, whose nodes give 0.25 to each episode; return their ids."""
    leases = world.lease(2 * groups)
    for lease in leases:
        assert world.done(lease, 0.25).accepted
    return list(dict.fromkeys(lease.task.group for lease in leases))


def waiting(world: World, group: str) -> Any:
    found = world.ledger.scoring.group(group)
    assert found is not None
    return found


def rewards(world: World, group: str) -> list[tuple[float, float]]:
    """Return the reward of each episode and of its sample."""
    rows = world.ledger.db.all(
        "SELECT t.reward AS task, s.reward AS sample FROM tasks t JOIN samples s ON s.grp = t.grp "
        "AND s.place = t.place WHERE t.grp = ? ORDER BY t.place",
        (group,),
    )
    return [(row["task"], row["sample"]) for row in rows]


def state(world: World, group: str) -> str:
    return str(world.ledger.groups.row(group).state)


def test_a_complete_group_waits_for_its_reward(world: World) -> None:
    (group,) = play(world)
    assert (state(world, group), world.ledger.scoring.waiting(8)) == ("playing", [group])
    assert world.ask("a").batch is None
    assert "1 waiting for their group's reward" in world.ask("b").waiting_for
    world.check()
    found = waiting(world, group)
    assert (found.prompt.payload, found.planned) == ({"n": 0}, 2)
    assert [(one.place, one.given, one.facts.evaluating) for one in found.episodes] == [
        (0, 0.25, False),
        (1, 0.25, False),
    ]

    assert world.ledger.score_group(found, numbers(1.0, 0.0))
    assert rewards(world, group) == [(1.25, 1.25), (0.25, 0.25)]
    assert (state(world, group), world.ledger.scoring.count) == ("open", 0)
    batch = world.ask("c").batch
    assert batch is not None
    assert [(one.reward, one.group_mean, one.group_std) for one in batch.samples] == [
        (1.25, 0.75, 0.5),
        (0.25, 0.75, 0.5),
    ]


def test_its_parts_are_metrics_and_filters_see_the_sum(world: World) -> None:
    (group,) = play(world)
    assert world.ledger.score_group(waiting(world, group), numbers(0.5, 0.5))
    assert state(world, group) == "filtered", "with equal rewards, as the group's reward has made them"
    assert world.ledger.groups.measured("SELECT ?", group) == {"episode/reward/rank": 0.5}


def test_a_group_is_scored_once(world: World) -> None:
    (group,) = play(world)
    found = waiting(world, group)
    assert world.ledger.score_group(found, numbers(1.0, 0.0))
    assert not world.ledger.score_group(found, numbers(5.0, 0.0))
    assert rewards(world, group) == [(1.25, 1.25), (0.25, 0.25)]


def test_a_crash_before_it_is_scored_asks_again_and_after_it_does_not(world: World) -> None:
    (group,) = play(world)
    world.ledger.commit()
    world.crash()
    assert world.ledger.scoring.waiting(8) == [group]
    assert world.ledger.score_group(waiting(world, group), numbers(1.0, 0.0))
    world.ledger.commit()
    world.crash()
    assert world.ledger.scoring.waiting(8) == []
    assert rewards(world, group) == [(1.25, 1.25), (0.25, 0.25)]


def test_an_answer_about_episodes_that_were_played_again_is_dropped(world: World) -> None:
    (group,) = play(world)
    found = waiting(world, group)
    world.lose(world.row_of(found.episodes[1].attempt))
    assert world.ledger.scoring.count == 0
    assert not world.ledger.score_group(found, numbers(1.0, 0.0))
    play(world)
    assert not world.ledger.score_group(found, numbers(1.0, 0.0)), "of the episode that was there before"
    assert world.ledger.score_group(waiting(world, group), numbers(0.0, 1.0))
    assert rewards(world, group) == [(0.25, 0.25), (1.25, 1.25)]


def test_what_was_scored_before_counts_once_when_the_rest_is_played_again(world: World) -> None:
    (group,) = play(world)
    found = waiting(world, group)
    assert world.ledger.score_group(found, numbers(1.0, 0.0))
    world.lose(world.row_of(found.episodes[1].attempt))
    play(world)
    assert [one.given for one in waiting(world, group).episodes] == [0.25, 0.25]
    assert world.ledger.score_group(waiting(world, group), numbers(2.0, 0.0))
    assert rewards(world, group) == [(2.25, 2.25), (0.25, 0.25)]


def test_without_a_reward_its_episodes_have_failed(world: World) -> None:
    (group,) = play(world)
    assert world.ledger.fail_group(waiting(world, group), "ValueError: no (mine.py:3 in rank)")
    row = world.ledger.groups.row(group)
    assert (row.state, row.cause) == ("failed", "reward_error")
    assert world.ledger.db.counter("failures.reward_error") == 2
    assert "mine.py:3 in rank" in world.ask("a").waiting_for
    world.check()


def test_a_reward_that_always_fails_ends_the_run(make_world: MakeWorld) -> None:
    world = make_world(group_reward=True, batch_groups=4, staleness=4, max_failures=4)
    for group in play(world, groups=2):
        world.ledger.fail_group(waiting(world, group), "ValueError: no")
    assert world.ledger.phase == "ended"
    assert world.ledger.reason == "too many failures: reward_error: ValueError: no"


def test_a_sum_that_is_too_large_is_no_reward(world: World) -> None:
    (group,) = play(world)
    world.ledger.score_group(waiting(world, group), numbers(1e300, 0.0))
    assert state(world, group) == "failed"


def test_episodes_that_failed_are_missing_and_a_lone_one_is_not_asked_about(make_world: MakeWorld) -> None:
    world = make_world(group_reward=True, group_size=3, attempts=1)
    leases = world.lease(3)
    for lease in leases[:2]:
        world.done(lease, 0.0)
    world.fail(leases[2])
    found = waiting(world, leases[0].task.group)
    assert (found.planned, [one.place for one in found.episodes]) == (3, [0, 1])

    again = world.lease(3)
    world.done(again[0], 0.0)
    for lease in again[1:]:
        world.fail(lease)
    assert state(world, again[0].task.group) == "failed"
    assert world.ledger.scoring.waiting(8) == [leases[0].task.group]


def test_a_late_group_is_scored_with_what_is_done_and_closed_once(make_world: MakeWorld) -> None:
    world = make_world(group_reward=True, group_size=3, group_deadline=5.0, batch_groups=1)
    leases = world.lease(3)
    for lease in leases[:2]:
        world.done(lease, 0.0)
    for _ in range(3):
        world.clock.time += 6.0
        world.beat([leases[2].attempt])
        world.ledger.expire()
    assert world.ledger.db.counter("cancelled.group_deadline") == 1
    assert [one.place for one in waiting(world, leases[0].task.group).episodes] == [0, 1]


def test_evaluations_are_scored_too(make_world: MakeWorld) -> None:
    world = make_world(group_reward=True, heldout=prompts(1, "h"), repeats=2)
    leases = [lease for lease in world.lease() if lease.task.lane == "eval"]
    for lease in leases:
        world.done(lease, 0.0)
    found = waiting(world, leases[0].task.group)
    assert all(one.facts.evaluating for one in found.episodes)
    assert not world.ledger.evaluations.results()
    assert world.ledger.evaluations.waiting_for().endswith("0 of 2 episodes left, 1 groups wait for their reward")
    world.ledger.score_group(found, numbers(1.0, 0.5))
    assert [one.reward for one in world.ledger.evaluations.results()] == [0.75]


def test_the_row_of_an_episode_is_that_of_its_first_trained_sample(world: World) -> None:
    first, second = world.lease(2)
    rows = [Row(unit="u", segment=0, offset=8 * n, length=8) for n in range(4)]
    for lease, own in ((first, rows[:2]), (second, rows[2:])):
        samples = [sample(0, trained=0, row=own[0]), sample(0, row=own[1])]
        assert world.done(lease, 0.0, samples=samples).accepted
    assert [one.row for one in waiting(world, first.task.group).episodes] == [rows[1], rows[3]]


def test_a_resumed_run_without_it_goes_on_with_what_nodes_gave(world: World) -> None:
    (group,) = play(world)
    world.ledger.commit()
    world.rules = changed(world.rules, group_reward=False)
    world.crash(resume=True)
    assert (state(world, group), world.ledger.scoring.count) == ("filtered", 0)


def test_the_audit_knows_a_group_that_should_not_wait(world: World) -> None:
    world.lease(2)
    with world.ledger.db.change():
        world.ledger.db.run("UPDATE groups SET scoring = 1 WHERE state = 'playing'")
    world.ledger.commit()
    wrong = [identity.name for identity in audit(world.path).identities if not identity.ok]
    assert wrong == ["groups: waiting for their group's reward, but with an open task or an end"]
    with world.ledger.db.change():
        world.ledger.db.run("UPDATE groups SET scoring = 0")

"""Batches: served, renewed, committed once; and how stale they may be."""

from __future__ import annotations

import json

import msgspec
import pytest

from dataflow_world import POLICY, RULES
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import EarliestDeadline, Fifo
from rillflow.dataflow.report import status
from rillflow.errors import BadRequest, LeaseLost, RunError

# ---------------------------------------------------------------- batches


def test_a_trainer_must_join_first(make_world):
    world = make_world(join=False)
    with pytest.raises(LeaseLost, match="no trainer"):
        world.ask()


def test_a_batch_waits_and_says_for_what(make_world):
    world = make_world()
    world.lease()
    assert world.ask().waiting_for == "0 of 2 groups ready, 4 tasks running, 1 node"


def test_the_same_attempt_gets_the_same_batch(make_world):
    world = make_world()
    world.play_all()
    first = world.ask("x").batch
    world.clock.time += 200
    again = world.ask("x").batch
    assert again == first
    world.clock.time += 200  # renewed by asking again
    world.ledger.expire()
    world.commit(first)
    with pytest.raises(LeaseLost):
        world.ask("x")


def test_a_batch_is_ordered_by_admission_whoever_finished_first(make_world):
    world = make_world()
    for lease in reversed(world.lease()):
        world.done(lease)
    assert [entry.id for entry in world.batch().samples] == [
        "t000000.0.0",
        "t000000.1.0",
        "t000001.0.0",
        "t000001.1.0",
    ]


def test_a_step_tells_the_mean_of_what_its_episodes_have_measured(make_world):
    world = make_world()
    for lease in world.lease():
        news = world.news(lease)
        kept = {"turns": float(lease.task.place), **({"won": 1.0} if lease.task.place else {})}
        world.ledger.complete(msgspec.structs.replace(news, metrics=kept))
    batch = world.batch()
    assert len(batch.samples) == 4
    world.commit(batch)
    (step,) = [json.loads(row["line"]) for row in world.ledger.db.all("SELECT line FROM events")]
    assert (step["episode/turns"], step["episode/won"]) == (0.5, 1.0)


def test_the_first_note_of_a_subject_is_kept_for_everybody_who_looks(make_world):
    world = make_world()
    for number, lease in enumerate(world.lease()):
        note = {"forks": f"found in episode {number}"} if number else {}
        world.ledger.complete(msgspec.structs.replace(world.news(lease), notes=note))
    assert status(world.ledger, []).notes == {"forks": "found in episode 1"}
    world.ledger.commit()
    world.crash()
    assert status(world.ledger, []).notes == {"forks": "found in episode 1"}


def test_rewarded_ends_are_counted_by_kind_in_the_status_and_the_metrics(make_world):
    world = make_world()
    for lease in world.lease():
        end = "agent_error" if lease.task.place else ""
        world.ledger.complete(msgspec.structs.replace(world.news(lease), end=end))
    assert status(world.ledger, []).counts["ended.agent_error"] == 2
    world.commit(world.batch())
    (step,) = [json.loads(row["line"]) for row in world.ledger.db.all("SELECT line FROM events")]
    assert step["counters"]["ended.agent_error"] == 2
    world.check()


def test_a_commit_moves_groups_and_version_together_and_once(make_world):
    world = make_world()
    world.play_all()
    batch = world.batch()
    assert world.commit(batch, 1).accepted
    assert world.commit(batch, 1).accepted
    assert (world.head, world.ledger.lineage.steps(POLICY)) == (1, 1)
    assert world.group("t000000") == ("trained", "")
    with pytest.raises(LeaseLost):
        world.commit(batch, 2)
    assert world.check()["train.trained"] == 2


def test_a_commit_that_is_refused_changes_nothing(make_world):
    world = make_world()
    world.step()
    world.play_all()
    batch = world.batch()
    with pytest.raises(BadRequest, match="used before"):
        world.commit(batch, 1)
    assert world.head == 1
    assert world.group(batch.samples[0].group) == ("leased", "")
    world.commit(batch, 2)


def test_an_expired_batch_returns_and_its_commit_is_refused(make_world):
    world = make_world()
    world.play_all()
    batch = world.batch()
    world.clock.time += RULES.batch_lease + 1
    world.ledger.expire()
    with pytest.raises(LeaseLost):
        world.commit(batch)
    again = world.batch()
    assert [entry.id for entry in again.samples] == [entry.id for entry in batch.samples]
    world.commit(again)
    assert world.check()["train.trained"] == 2


def test_a_new_attempt_gives_the_former_batch_up(make_world):
    world = make_world()
    world.play_all()
    first, second = world.batch(), world.batch()
    with pytest.raises(LeaseLost):
        world.commit(first)
    world.commit(second)


def test_a_batch_that_can_never_be_ready_is_refused(make_world):
    with pytest.raises(BadRequest, match="never be ready"):
        make_world().ask(groups=3)


def test_a_trainer_on_another_version_must_join_again(make_world):
    world = make_world()
    world.step()
    with pytest.raises(LeaseLost, match="the trainer stands at version 0, the ledger at 1"):
        world.ledger.lease_batch(_ask(world, version=0))


def _ask(world, version):
    from rillflow.types import LeaseBatch

    return LeaseBatch(policy="main", incarnation=world.incarnation, attempt="q", groups=2, version=version, wait=0)


def test_samplers():
    class Group:
        def __init__(self, id, order, oldest):
            self.id, self.order, self.oldest, self.staleness = id, order, oldest, 6 - oldest

    ready = [Group("a", 1, 5), Group("b", 2, 4), Group("c", 3, 5), Group("d", 0, 6)]
    assert EarliestDeadline().pick(ready, 3) == ["b", "a", "c"]
    assert Fifo().pick(ready, 3) == ["d", "a", "b"]


def test_a_sampler_that_picks_nonsense_is_named(make_world):
    class Greedy:
        def pick(self, ready, want):
            return [ready[0].id] * want

    world = make_world(hooks=Hooks(sampler=Greedy()))
    world.play_all()
    with pytest.raises(RunError, match="sampler picked"):
        world.ask()
    assert world.check()["shares.main.ready"] == 2


# ---------------------------------------------------------------- staleness


def test_a_node_too_far_behind_gets_no_train_tasks(make_world):
    world = make_world(staleness=1)
    world.step()
    world.step()
    assert world.lease(version=0) == []
    assert "the bound is 1" in world.ledger.why_no_tasks("n0", {POLICY: 0})


def test_weights_that_are_behind_play_what_is_trained_that_much_sooner(make_world):
    """Else what they sample is too old when its turn comes, and was played for nothing."""
    world = make_world(staleness=2)
    world.step()  # four groups are ready, the next two are pending: trained two steps from now
    assert world.lease(version=0) == []
    assert "need a newer version" in world.ledger.why_no_tasks("n0", {POLICY: 0})
    assert {lease.task.group for lease in world.lease(1, version=1)} == {"t000006"}
    world.commit(world.batch())  # two are ready, two are ahead of all others: those are two steps from now again
    assert {lease.task.group for lease in world.lease(version=1)} == {"t000006", "t000007"}
    assert {lease.task.group for lease in world.lease(version=2)} == {"t000008", "t000009"}


def test_stale_groups_expire_and_are_never_served(make_world):
    world = make_world(staleness=1)
    late, *others = [lease for lease in world.lease() if lease.task.group == "t000000"]
    while world.head < 3:
        for lease in world.lease():
            world.done(lease)
        for group in ("t000001", "t000002", "t000003"):
            for row in world.ledger.db.all("SELECT id, attempt FROM tasks WHERE grp=? AND state='leased'", (group,)):
                world.done(_lease_of(row), reward=float(row["id"][-1]), version=0)
        world.commit(world.batch())
    world.done(late, version=0)
    for lease in others:
        world.done(lease, version=0)
    assert world.group("t000000") in (("ready", ""), ("expired", "stale"))
    world.ask()
    assert world.group("t000000") == ("expired", "stale")
    assert world.check()["train.expired.stale"] == 1


def _lease_of(row):
    from rillflow.types import Prompt, Task, TaskLease

    task = Task(id=row["id"], prompt=Prompt(id="", payload={}), group="", place=0, lane="train", seed=0)
    return TaskLease(task=task, attempt=row["attempt"], seconds=1)


def test_a_doomed_group_is_not_played_to_its_end(make_world):
    world = make_world(staleness=1, batch_groups=1)
    leases = world.lease(3)
    world.done(leases[0], version=0)  # one of two; the other hangs
    for _ in range(2):
        for lease in world.lease():
            world.done(lease)
        for lease in leases[2:]:
            world.done(lease, version=0)
        world.commit(world.batch())
    assert world.group("t000000") == ("expired", "stale")
    assert world.task("t000000.1") == "cancelled"
    assert not world.done(leases[1]).accepted
    assert world.beat([leases[1].attempt]).lost == [leases[1].attempt]


def test_on_policy_tokens_of_an_older_version_are_played_again(make_world):
    world = make_world()
    world.step()
    lease = world.lease(1)[0]
    ack = world.done(lease, version=0)
    assert not ack.accepted
    assert world.task(lease.task.id) == "pending"
    again = world.lease(1)[0]
    assert (again.task, again.attempt != lease.attempt) == (lease.task, True)
    assert world.done(again, version=1).accepted
    assert world.ledger.steps.counters()["rerun.stale"] == 1


def test_on_policy_groups_left_over_are_played_again(make_world):
    world = make_world()
    world.play_all()
    world.commit(world.batch(groups=1))
    assert world.group("t000001") == ("playing", "")
    world.play_all()
    batch = world.batch()
    assert {entry.group for entry in batch.samples} == {"t000001", "t000002"}
    assert {entry.staleness for entry in batch.samples} == {0}


def test_on_policy_weights_ahead_of_the_commit_get_no_tasks(make_world):
    world = make_world()
    assert world.lease(version=1) == []
    assert make_world(staleness=1).lease(version=1) != []


def test_a_batch_that_may_never_fill_says_why(make_world):
    world = make_world(group_size=4)

    def play(*rewards):
        """Play a group, in six seconds."""
        for lease, reward in zip(world.lease(4), rewards, strict=True):
            world.done(lease, reward)
        world.clock.time += 6.0

    for _ in range(9):
        play(0.0, 0.0, 0.0, 0.0)
    assert "rewards" not in world.ask().waiting_for, "too few to tell"
    play(0.0, 0.0, 0.0, 0.0)
    assert world.ask().waiting_for.endswith("; all 40 rewards of the last 60 s were 0.0 (10 groups)")
    play(1.0, 1.0, 1.0, 1.0)
    play(0.0, 1.0, 0.0, 0.0)
    assert "11 of 12 groups of the last 72 s had equal rewards: 10 with 0.0, 1 with 1.0" in world.ask().waiting_for
    play(0.0, 1.0, 0.0, 0.0)
    world.commit(world.batch())
    assert "rewards" not in world.ask().waiting_for, "a step was made: what came before it is no news"


def test_a_run_whose_episodes_fail_says_what_with(make_world):
    world = make_world()
    first, second, third = world.lease(3)
    world.fail(first, "timeout")
    world.fail(second, "reward_error", error="ZeroDivisionError:\ndivision by zero (mine.py:3 in reward)")
    told = world.ask().waiting_for
    assert "; the last 2 episodes failed, the latest with reward_error: ZeroDivisionError: division by zero (" in told
    world.done(third)
    assert "failed" not in world.ask().waiting_for

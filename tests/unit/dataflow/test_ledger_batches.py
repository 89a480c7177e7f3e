"""Batches, versions, staleness, rollbacks, evaluations and the end of a run."""

from __future__ import annotations

import math

import pytest
from dataflow_world import POLICY, RULES, prompts, sample

from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.hooks.samplers.earliest_deadline import EarliestDeadline
from rillflow.dataflow.hooks.samplers.fifo import Fifo
from rillflow.errors import BadRequest, DiskFull, LeaseLost, RunError, StorageError
from rillflow.types import JoinTrainer

# ---------------------------------------------------------------- batches


def test_a_trainer_must_join_first(make_world):
    world = make_world(join=False)
    with pytest.raises(LeaseLost, match="no trainer"):
        world.ask()


def test_a_batch_waits_and_says_for_what(make_world):
    world = make_world()
    world.lease()
    assert world.ask().waiting_for == "0 of 2 groups ready, 4 tasks running, 1 nodes"


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


def test_a_commit_moves_groups_and_version_together_and_once(make_world):
    world = make_world()
    world.play_all()
    batch = world.batch()
    assert world.commit(batch, 1).accepted
    assert world.commit(batch, 1).accepted
    assert (world.ledger.lineage.head, world.ledger.lineage.steps) == (1, 1)
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
    assert world.ledger.lineage.head == 1
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
    world.ledger.db.run("UPDATE policies SET version = 0")
    with pytest.raises(LeaseLost):
        world.ledger.lease_batch(_ask(world, version=1))
    world.ledger.db.run("UPDATE policies SET version = 1")


def _ask(world, version):
    from rillflow.types import LeaseBatch

    return LeaseBatch(policy="main", incarnation=world.incarnation, attempt="q", groups=2, version=version, wait=0)


def test_samplers():
    class Group:
        def __init__(self, id, order, oldest):
            self.id, self.order, self.oldest = id, order, oldest

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
    assert world.check()["train.ready"] == 2


# ---------------------------------------------------------------- staleness


def test_a_node_too_far_behind_gets_no_train_tasks(make_world):
    world = make_world(staleness=1)
    world.step()
    world.step()
    assert world.lease(version=0) == []
    assert "the bound is 1" in world.ledger.why_no_tasks(0)
    assert world.lease(version=1) != []


def test_stale_groups_expire_and_are_never_served(make_world):
    world = make_world(staleness=1)
    late, *others = [lease for lease in world.lease() if lease.task.group == "t000000"]
    while world.ledger.lineage.head < 3:
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
    assert world.ledger.batches.counters()["rerun.stale"] == 1


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


# ---------------------------------------------------------------- lineage


def test_a_join_without_progress_rolls_nothing_back(make_world):
    world = make_world()
    world.step()
    joined = world.join(1)
    assert (joined.version, joined.highest, joined.steps, joined.orphaned, joined.rolled_back) == (1, 1, 1, [], 0)


def test_joining_again_under_the_same_incarnation_repeats_the_answer(make_world):
    world = make_world()
    world.step()
    first = world.join(0)
    world.incarnations -= 1
    assert world.join(0) == first
    assert first.orphaned == [1]
    world.step()
    world.incarnations -= 1
    assert world.join(0) == first
    assert world.ledger.lineage.head == 2


def test_a_late_copy_of_a_former_trainers_join_takes_nothing_back(make_world):
    world = make_world()
    former = JoinTrainer(policy=POLICY, incarnation=world.incarnation, checkpoint=0)
    world.join()
    world.step()
    world.ledger.commit()
    world.crash()
    with pytest.raises(LeaseLost, match="another trainer"):
        world.ledger.join_trainer(former)
    assert world.ledger.lineage.head == 1
    world.step()
    assert world.check()["rolled_back"] == 0


def test_rollback_returns_live_batches_and_replays_those_of_dead_versions(make_world):
    world = make_world()
    batches = [world.step() for _ in range(3)]
    lost = world.lease()
    joined = world.join(1)
    assert (joined.version, joined.highest, joined.steps) == (1, 3, 1)
    assert (joined.orphaned, joined.rolled_back) == ([2, 3], 4)
    world.check()
    assert [world.done(lease, version=3).accepted for lease in lost] == [False] * 4
    # The batch sampled by version 1 lives; nothing beyond it is played until it is trained.
    assert world.lease() == []
    again = world.batch()
    assert [entry.id for entry in again.samples] == [entry.id for entry in batches[1].samples]
    world.commit(again, 4)
    replayed = world.lease()
    assert [lease.task.group for lease in replayed] == [entry.group for entry in batches[2].samples]
    for lease in replayed:
        world.done(lease)
    third = world.batch()
    assert [entry.id for entry in third.samples] == [entry.id for entry in batches[2].samples]
    world.commit(third)
    assert [lease.task for lease in world.lease()] == [lease.task for lease in lost]
    counts = world.check()
    assert (counts["rolled_back"], counts["train.trained"], counts["steps"]) == (4, 6, 3)


def test_a_node_on_a_dead_version_gets_nothing_and_its_episodes_are_replayed(make_world):
    world = make_world(staleness=2)
    world.step()
    lease = world.lease(1)[0]
    world.join(0)
    assert world.lease(version=1) == []
    assert "no live version" in world.ledger.why_no_tasks(1)
    ack = world.done(lease, samples=[sample(0, newest=1)])
    assert (ack.accepted, ack.reason) == (False, "rolled_back: the task is played again")
    assert world.ledger.db.value("SELECT failures FROM tasks WHERE id = ?", (lease.task.id,)) == 0


def test_versions_published_but_never_committed_are_dead_after_a_join(make_world):
    world = make_world(staleness=2)
    lease, other, *_ = world.lease(version=1)  # a trainer has published 1 and dies before its commit
    world.done(lease, version=1)
    joined = world.join(0, published=1)
    assert (joined.highest, joined.orphaned) == (1, [])
    assert world.task(lease.task.id) == "pending"
    assert not world.done(other, version=1).accepted
    assert world.lease(node="n1", version=1) == []
    world.clock.time += 60
    world.ledger.expire()
    world.step()
    assert world.ledger.lineage.head == 2


def test_versions_that_the_line_passed_over_are_dead_without_being_named(make_world):
    world = make_world(staleness=3)
    leases = world.lease(version=1)
    for lease in leases[:4]:
        world.done(lease, version=0)
    world.done(leases[4], version=1)  # published, never committed
    world.join(0)
    world.commit(world.batch(), 2)
    assert world.task(leases[4].task.id) == "pending"
    assert not world.done(leases[5], version=1).accepted
    assert world.done(leases[6], version=2).accepted


def test_a_ready_group_of_weights_that_died_before_their_commit_is_not_served(make_world):
    world = make_world(staleness=1)
    for lease in world.lease(version=1)[:4]:
        world.done(lease, version=1)
    world.join(0)
    assert world.ask().batch is None
    assert world.group("t000000") == ("playing", "")


def test_a_checkpoint_must_be_on_the_live_line(make_world):
    world = make_world()
    world.step()
    world.join(0)
    for dead in (1, 7):
        with pytest.raises(BadRequest, match="live line"):
            world.join(dead)


def test_a_former_trainer_can_neither_lease_nor_commit(make_world):
    world = make_world()
    world.play_all()
    batch, former = world.batch(), world.incarnation
    world.join(0)
    world.incarnation, current = former, world.incarnation
    with pytest.raises(LeaseLost):
        world.commit(batch)
    with pytest.raises(LeaseLost):
        world.ask()
    world.incarnation = current
    assert world.batch().samples == batch.samples


def test_a_rollback_after_the_last_step_goes_on_training(make_world):
    world = make_world(total_steps=2)
    world.step()
    world.step()
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "done")
    world.join(1)
    assert world.ledger.phase == "training"
    world.step()
    assert (world.ledger.phase, world.ledger.lineage.head) == ("ended", 3)


# ---------------------------------------------------------------- restart


def test_what_was_committed_survives_a_kill_and_nothing_else(make_world):
    world = make_world()
    leases = world.lease()
    world.done(leases[0])
    world.ledger.commit()
    world.done(leases[1])
    world.crash()
    assert world.task(leases[0].task.id) == "done"
    assert world.task(leases[1].task.id) == "leased"
    assert world.done(leases[0]).accepted
    assert world.done(leases[1]).accepted
    world.check()


def test_live_leases_get_a_grace_period_after_a_restart(make_world):
    world = make_world()
    lease = world.lease(1)[0]
    world.ledger.commit()
    world.clock.time += 3600
    world.crash()
    world.ledger.expire()
    assert world.task(lease.task.id) == "leased"
    assert world.beat([lease.attempt]).lost == []
    assert world.done(lease).accepted


def test_a_full_disk_takes_the_open_transaction_back(make_world):
    world = make_world(staleness=6)
    told = []
    world.ledger.on_abandon = told.append
    leases = world.lease()
    world.ledger.commit()
    pages = world.ledger.db.value("PRAGMA page_count")
    world.ledger.db.run(f"PRAGMA max_page_count = {pages}")

    def complete_all():
        for lease in leases:
            world.done(lease, samples=[sample(0)] * 20)

    with pytest.raises(DiskFull, match="no space left"):
        complete_all()
    assert len(told) == 1
    assert {world.task(lease.task.id) for lease in leases} == {"leased"}
    world.ledger.db.run("PRAGMA max_page_count = 1000000")
    for lease in leases:
        assert world.done(lease, samples=[sample(0)] * 20).accepted


def test_a_file_that_is_no_ledger_is_refused(make_world, tmp_path):
    world = make_world()
    world.path, real = tmp_path / "nonsense", world.path
    world.path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(StorageError, match="damaged"):
        world.open()
    world.path = real


# ---------------------------------------------------------------- evaluation and the end


def test_evaluations_come_first_and_never_enter_a_batch(make_world):
    world = make_world(heldout=prompts(3, "h"), repeats=2, evaluate_every=2, total_steps=3, staleness=1)
    leases = world.lease(7)
    assert [lease.task.id for lease in leases] == [f"e0.00000{n}.{p}" for n in range(3) for p in (0, 1)] + ["t000000.0"]
    assert leases[0].task.lane == "eval"
    for lease in leases:
        world.done(lease, reward=1.0)
    assert [(e.version, e.reward, e.episodes, e.failed) for e in world.ledger.evaluations.results()] == [(0, 1.0, 6, 0)]
    for _ in range(3):
        world.step()
    assert world.ledger.phase == "finishing"
    assert [e.version for e in world.ledger.evaluations.results()] == [0, 2]
    assert world.ask().waiting_for == "nothing: the run is finishing (done)"
    assert {lease.task.lane for lease in world.lease(1)} == {"eval"}
    world.clock.time += 60
    world.ledger.expire()
    world.play_all()
    assert world.ledger.phase == "ended"
    assert [e.version for e in world.ledger.evaluations.results()] == [0, 2, 3]
    counts = world.check()
    assert counts["eval.evaluated"] == 9
    assert counts["train.outstanding"] == 0


def test_evaluations_are_played_by_weights_that_are_new_enough(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, staleness=2)
    world.step()
    assert {lease.task.lane for lease in world.lease(version=0)} == {"train"}
    assert world.lease(version=1)[0].task.lane == "eval"


def test_on_policy_training_waits_for_the_evaluation(make_world):
    world = make_world(heldout=prompts(1, "h"))
    evaluation, *train = world.lease()
    for lease in train:
        world.done(lease)
    assert world.ask().waiting_for == "the evaluation of version 0: 1 of 1 episodes left"
    world.done(evaluation)
    world.batch()


def test_failed_evaluations_are_counted_and_never_zero(make_world):
    world = make_world(heldout=prompts(2, "h"), attempts=1)
    first, second, *_ = world.lease()
    world.fail(first)
    world.done(second, reward=1.0)
    (result,) = world.ledger.evaluations.results()
    assert (result.reward, result.episodes, result.failed) == (1.0, 1, 1)
    world = make_world(heldout=prompts(1, "h"), attempts=1)
    world.fail(world.lease()[0])
    assert math.isnan(world.ledger.evaluations.results()[0].reward)


def test_an_evaluation_of_a_dead_version_is_void_and_asked_for_again(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1)
    world.play_all()
    world.step()
    first = world.lease(1)[0].task
    world.join(0)
    world.step()
    again = world.lease(1)[0].task
    assert (first.id, again.id) == ("e1.000000.0", "e2.000000.0")
    assert first.seed == again.seed
    assert world.check()["eval.expired.rolled_back"] == 1


def test_the_run_ends_when_its_steps_are_done(make_world):
    world = make_world(total_steps=1, staleness=1)
    *leases, hanging = world.lease()
    for lease in leases:
        world.done(lease)
    world.commit(world.batch())
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "done")
    assert not world.done(hanging).accepted
    counts = world.check()
    assert counts["train.trained"] == 2
    assert counts["train.expired.run_ended"] == 2
    assert world.ask().phase == "ended"


def test_the_last_batch_may_be_smaller_when_prompts_run_out(make_world):
    world = make_world(source=prompts(3), epochs=1)
    world.step()
    assert world.ask().batch is None
    world.play_all()
    batch = world.batch()
    assert {entry.group for entry in batch.samples} == {"t000002"}
    world.commit(batch)
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "out of prompts")
    assert world.check()["train.trained"] == 3


def test_epochs_repeat_the_prompts(make_world):
    world = make_world(source=prompts(2), epochs=2)
    world.step()
    leases = world.lease()
    assert [lease.task.prompt.id for lease in leases] == ["p0", "p0", "p1", "p1"]
    assert leases[0].task.group == "t000002"


def test_a_stopped_run_keeps_what_is_outstanding_and_goes_on_when_resumed(make_world):
    world = make_world()
    leases = world.lease()
    world.done(leases[0])
    world.ledger.stop("stopped")
    assert world.lease() == []
    assert not world.done(leases[1]).accepted
    assert world.ask().phase == "ended"
    world.check()
    world.crash()
    assert world.ledger.phase == "ended"
    world.crash(resume=True)
    assert [lease.task for lease in world.lease()] == [lease.task for lease in leases[1:]]


def test_the_batch_in_work_may_be_committed_after_a_stop(make_world):
    world = make_world()
    world.play_all()
    batch = world.batch()
    world.ledger.stop("stopped")
    world.commit(batch)
    assert world.ledger.phase == "ended"


def test_more_steps_reopen_a_run_that_was_done(make_world):
    from dataclasses import replace

    world = make_world(total_steps=1)
    world.step()
    world.ledger.commit()
    assert world.ledger.phase == "ended"
    world.rules = replace(world.rules, total_steps=2)
    world.crash()
    assert world.ledger.phase == "training"
    world.step()
    assert world.ledger.lineage.steps == 2

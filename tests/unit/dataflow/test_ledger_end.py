"""Evaluations, and how a run ends and is taken up again."""

from __future__ import annotations

import json
import math

from dataflow_world import POLICY, changed, policies, prompts


def test_evaluations_never_enter_a_batch(make_world):
    world = make_world(heldout=prompts(3, "h"), repeats=2, evaluate_every=2, total_steps=3, staleness=1)
    leases = world.lease(8)
    evaluations = [f"e0.00000{n}.{p}" for n in range(3) for p in (0, 1)]
    assert [lease.task.id for lease in leases[:4]] == evaluations[:4]
    assert {lease.task.lane for lease in leases[4:]} == {"train"}
    leases += world.lease(4)
    assert [lease.task.id for lease in leases if lease.task.lane == "eval"] == evaluations
    for lease in leases:
        world.done(lease, reward=1.0 if lease.task.lane == "eval" else None)
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


def test_evaluations_take_half_of_what_a_node_holds_while_training_tasks_are_pending(make_world):
    world = make_world(heldout=prompts(9, "h"), staleness=1)
    assert [lease.task.lane for lease in world.lease(1)] == ["eval"]
    assert [lease.task.lane for lease in world.lease(1)] == ["train"]
    assert [lease.task.lane for lease in world.lease(6)] == ["eval"] * 3 + ["train"] * 3
    world.lease(4, node="n1")
    lanes = [lease.task.lane for lease in world.lease(20, node="n2")]
    assert lanes.count("eval") == 3  # all that is left of both
    assert lanes.count("train") == 2


def test_evaluations_come_first_where_training_waits_for_them_anyway(make_world):
    world = make_world(heldout=prompts(3, "h"))
    assert [lease.task.lane for lease in world.lease(4)] == ["eval"] * 3 + ["train"]


def test_evaluations_take_all_when_no_training_task_is_pending(make_world):
    world = make_world(heldout=prompts(9, "h"), staleness=1, batch_groups=1, group_size=1)
    assert [lease.task.lane for lease in world.lease(8)] == ["eval"] * 4 + ["train"] * 2 + ["eval"] * 2


def test_evaluations_are_played_by_weights_that_are_new_enough(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, staleness=2)
    for lease in world.lease(5):
        world.done(lease)
    world.commit(world.batch())
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


def test_the_final_evaluation_is_of_the_versions_that_all_policies_ended_with(make_world):
    rules = policies(main={"staleness": 1, "total_steps": 1}, other={"staleness": 1, "total_steps": 3})
    world = make_world(policies=rules, heldout=prompts(1, "h"), evaluate_every=1)
    world.step()
    for _ in range(3):
        world.step("other")
    world.play_all()
    assert world.ledger.phase == "ended"
    rounds = [json.loads(row["versions"]) for row in world.ledger.db.all("SELECT versions FROM rounds ORDER BY id")]
    assert rounds == [{"main": 0, "other": 0}, {"main": 1, "other": 0}, {"main": 1, "other": 3}]


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
    world = make_world(total_steps=1)
    world.step()
    world.ledger.commit()
    assert world.ledger.phase == "ended"
    world.rules = changed(world.rules, total_steps=2)
    world.crash()
    assert world.ledger.phase == "training"
    world.step()
    assert world.ledger.lineage.steps(POLICY) == 2


def test_a_stopped_run_ends_no_group_for_its_deadline(make_world):
    world = make_world(group_deadline=100.0)
    world.done(world.lease(1)[0])
    world.ledger.stop("stopped")
    world.clock.time += 200
    world.ledger.expire()
    assert world.group("t000000") == ("playing", "")


def test_more_epochs_reopen_a_run_that_was_out_of_prompts(make_world):
    world = make_world(staleness=1, source=prompts(2), epochs=1)
    world.step()
    world.ledger.commit()
    world.crash(resume=True)
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "out of prompts")
    world.rules = changed(world.rules, epochs=2)
    world.crash(resume=True)
    assert world.ledger.phase == "training"
    world.step()
    assert world.ledger.reason == "out of prompts"

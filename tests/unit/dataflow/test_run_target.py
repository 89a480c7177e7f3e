"""A run with a target ends when an evaluation has reached it: nothing more is leased, the step in work is kept."""

from __future__ import annotations

import json

import pytest

from dataflow_world import POLICY, changed, policies, prompts
from rillflow.errors import LeaseLost


def played(world, reward):
    """Play the running round to this reward, and whatever training task is leased meanwhile."""
    while world.ledger.evaluations.running:
        for lease in world.lease(1):
            world.done(lease, reward=reward if lease.task.lane == "eval" else None)


def ended(world):
    return world.ledger.phase, world.ledger.reason


def rounds(world):
    return [row["state"] for row in world.ledger.db.all("SELECT state FROM rounds ORDER BY id")]


def test_the_round_that_reaches_the_target_ends_the_run(make_world):
    world = make_world(heldout=prompts(2, "h"), evaluate_every=1, target=0.5)
    played(world, 0.4)
    world.step()
    assert world.ledger.phase == "training"
    played(world, 0.5)
    assert ended(world) == ("ended", "target reached")
    assert world.ask().batch is None
    assert world.ask().waiting_for == "nothing: the run is ended (target reached)"
    assert world.lease() == []
    assert rounds(world) == ["ended", "ended"], "no final evaluation is played"
    counts = world.check()
    assert counts["train.outstanding"] == 0
    assert counts["train.trained"] == 2


def test_the_first_round_counts_too(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, target=0.5)
    played(world, 1.0)
    assert ended(world) == ("ended", "target reached")


def test_without_a_target_no_round_ends_a_run(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1)
    played(world, 1.0)
    assert world.ledger.phase == "training"


def test_a_round_with_a_failed_episode_does_not_count(make_world):
    world = make_world(heldout=prompts(2, "h"), evaluate_every=1, attempts=1, target=0.5)
    first, second, *_ = world.lease()
    world.fail(first)
    world.done(second, reward=1.0)
    assert world.ledger.evaluations.results()[0].reward == 1.0
    assert world.ledger.phase == "training"


def test_the_batch_in_work_is_committed_before_the_run_ends(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=4, staleness=1, target=0.5)
    evaluation, *train = world.lease()
    for lease in train:
        world.done(lease)
    batch = world.batch()
    world.done(evaluation, reward=1.0)
    assert ended(world) == ("finishing", "target reached")
    assert world.ask().batch is None
    world.commit(batch)
    assert ended(world) == ("ended", "target reached")
    assert world.ledger.lineage.steps(POLICY) == 1
    assert world.check()["train.trained"] == 2


def test_a_batch_in_work_that_is_lost_ends_with_the_run(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=4, staleness=1, target=0.5)
    evaluation, *train = world.lease()
    for lease in train:
        world.done(lease)
    batch = world.batch()
    world.done(evaluation, reward=1.0)
    world.clock.time += 400
    world.ledger.expire()
    assert ended(world) == ("ended", "target reached")
    with pytest.raises(LeaseLost):
        world.commit(batch)
    counts = world.check()
    assert counts["train.outstanding"] == 0
    assert counts["train.expired.run_ended"] == 4


def test_a_batch_that_still_grows_is_given_back(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=4, staleness=1, target=0.5)
    evaluation, first, second, *_ = world.lease()
    world.done(first)
    world.done(second)
    part = world.ask("stream", least=1).batch
    assert part is not None
    assert not part.complete
    world.done(evaluation, reward=1.0)
    assert ended(world) == ("ended", "target reached")
    with pytest.raises(LeaseLost):
        world.ask("stream", have=1, least=1)
    assert world.ask().phase == "ended"


def test_rounds_that_still_run_are_cancelled(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, staleness=2, target=0.5)
    first, *train = world.lease()
    for lease in train:
        world.done(lease)
    world.commit(world.batch())
    (second,) = [lease for lease in world.lease() if lease.task.lane == "eval"]
    world.done(first, reward=1.0)
    assert ended(world) == ("ended", "target reached")
    assert rounds(world) == ["ended", "cancelled"]
    assert not world.done(second, reward=0.0).accepted
    assert world.check()["eval.expired.run_ended"] == 1


def test_a_final_evaluation_that_reaches_the_target_says_so(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=5, total_steps=1, target=0.5)
    played(world, 0.0)
    world.step()
    assert ended(world) == ("finishing", "done")
    played(world, 1.0)
    assert ended(world) == ("ended", "target reached")


def test_a_run_that_misses_its_target_is_done_after_its_steps(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, total_steps=1, target=0.5)
    played(world, 0.0)
    world.step()
    played(world, 0.4)
    assert ended(world) == ("ended", "done")


@pytest.mark.parametrize("raised", [0.9, None])
def test_a_higher_target_or_none_reopens_the_run(make_world, raised):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, staleness=2, target=0.5)
    played(world, 0.6)
    world.ledger.commit()
    world.crash(resume=True)
    assert ended(world) == ("ended", "target reached"), "nothing is left to do"
    world.rules = changed(world.rules, target=raised)
    world.crash()
    assert world.ledger.phase == "training"
    world.step()
    played(world, 0.95)
    assert ended(world) == (("ended", "target reached") if raised else ("training", ""))


def test_a_raised_target_has_the_cancelled_round_played_again(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, staleness=2, target=0.5)
    first, *train = world.lease()
    for lease in train:
        world.done(lease)
    world.commit(world.batch())
    world.done(first, reward=0.6)
    assert rounds(world) == ["ended", "cancelled"]
    world.ledger.commit()
    world.rules = changed(world.rules, target=0.9)
    world.crash()
    assert rounds(world) == ["ended", "cancelled", "running"]


def test_a_rollback_that_takes_the_round_along_goes_on_training(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=1, target=0.5)
    played(world, 0.0)
    world.step()
    played(world, 1.0)
    assert ended(world) == ("ended", "target reached")
    world.join(0)
    assert world.ledger.phase == "training"
    world.step()
    played(world, 1.0)
    assert ended(world) == ("ended", "target reached")


def test_a_rollback_to_the_round_or_after_it_needs_no_more_steps(make_world):
    world = make_world(heldout=prompts(1, "h"), evaluate_every=4, staleness=1, target=0.5)
    evaluation, *train = world.lease()
    for lease in train:
        world.done(lease)
    world.commit(world.batch())
    world.done(evaluation, reward=1.0)
    assert ended(world) == ("ended", "target reached")
    assert world.join(0).orphaned == [1]
    assert ended(world) == ("ended", "target reached")
    counts = world.check()
    assert (counts.get("train.trained", 0), counts["train.outstanding"]) == (0, 0)


def test_one_round_ends_the_training_of_all_policies(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1})
    world = make_world(policies=rules, heldout=prompts(1, "h"), evaluate_every=1, target=0.5)
    played(world, 0.0)
    world.step("other")
    world.step()
    played(world, 1.0)
    assert ended(world) == ("ended", "target reached")
    assert world.ask(policy="other").phase == "ended"


def test_a_round_with_a_version_that_died_does_not_count(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1})
    world = make_world(policies=rules, heldout=prompts(1, "h"), evaluate_every=1, target=0.5)
    played(world, 0.0)
    world.step("other")
    world.step()
    played(world, 1.0)
    assert json.loads(world.ledger.db.value("SELECT versions FROM rounds WHERE id = 1")) == {"main": 1, "other": 1}
    assert world.ledger.phase == "ended"
    world.join(0, policy="other")
    assert world.ledger.phase == "training"

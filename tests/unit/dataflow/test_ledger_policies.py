"""Several policies: shares and their routes, no barrier between trainers, staleness and rollback of each."""

from __future__ import annotations

import pytest

from dataflow_world import POLICY, changed, policies, prompts, sample
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.report import status
from rillflow.dataflow.rules import Rules
from rillflow.errors import BadRequest, ConfigError

OWN = policies(main={"staleness": 1}, other={"staleness": 1})


def groups_of(batch):
    return {(entry.group, entry.policy) for entry in batch.samples}


def test_each_policy_has_its_own_stream(make_world):
    world = make_world(policies=OWN)
    world.play_all()
    for policy in ("main", "other"):
        batch = world.batch(policy=policy)
        assert {entry.policy for entry in batch.samples} == {policy}
        world.commit(batch)
    assert world.ledger.heads == {"main": 1, "other": 1}
    assert world.group("t000000") == ("trained", "")
    counts = world.check()
    assert (counts["train.trained"], counts["main.members.fresh"], counts["other.members.fresh"]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("trains_on", "producers"),
    [({"main": ("other",)}, {"other"}), ({"main": ("main", "other")}, {"main", "other"})],
)
def test_streams_may_train_on_what_others_have_sampled(make_world, trains_on, producers):
    rules = policies(main={"staleness": 1, "trains_on": trains_on["main"]}, other={"staleness": 1})
    world = make_world(policies=rules)
    world.play_all()
    batch = world.batch()
    assert {entry.policy for entry in batch.samples} == producers
    world.commit(batch)
    world.commit(world.batch(policy="other"))
    world.check()


def test_a_share_knows_its_producers_episodes_alone(make_world):
    world = make_world(policies=OWN, group_size=3, hooks=Hooks())
    for lease in world.lease(3):
        place = lease.task.place
        both = [sample(0, row=world.row(), reward=1.0 + place), sample(0, row=world.row(), reward=3.0 + place)]
        other = [sample(0, policy="other", row=world.row(), reward=10.0 * place)] if place else []
        world.done(lease, reward=float(place), samples=both + other)
    entries = {policy: world.batch(groups=1, policy=policy).samples for policy in ("main", "other")}
    assert {(e.group_mean, e.group_size) for e in entries["main"]} == {(3.0, 3)}
    assert {(e.group_mean, e.group_std, e.group_size) for e in entries["other"]} == {(15.0, 5.0, 2)}
    assert [e.id for e in entries["other"]] == ["t000000.1.2", "t000000.2.2"]
    assert [e.task for e in entries["other"]] == ["t000000.1", "t000000.2"]


def test_filters_judge_each_producer(make_world):
    world = make_world(policies=OWN)
    for lease in world.lease(2):
        flat = sample(0, policy="other", row=world.row(), reward=5.0)
        world.done(lease, samples=[sample(0, row=world.row(), reward=1.0 + lease.task.place), flat])
    assert world.share("t000000", "main") == ("ready", "")
    assert world.share("t000000", "other") == ("filtered", "zero_variance")
    world.lose(world.row_of("t000000.0-1"))


def test_a_policy_that_played_too_few_episodes_has_nothing_to_compare(make_world):
    world = make_world(policies=OWN)
    for lease in world.lease(2):
        once = [sample(0, policy="other", row=world.row())] if lease.task.place else []
        world.done(lease, samples=[sample(0, row=world.row()), *once])
    assert world.share("t000000", "other") == ("filtered", "too_few")
    assert world.group("t000001")[0] == "playing"


def test_samples_that_no_stream_takes_end_their_group_and_are_released(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1, "trains_on": ("main",)})
    world = make_world(policies=rules)
    for lease in world.lease(2):
        world.done(lease, samples=[sample(0, policy="other", row=world.row())])
    assert world.group("t000000") == ("filtered", "no_stream")
    assert world.segment() == (0, "live")


def test_curators_observe_the_first_policys_part(make_world):
    class Seen:
        def __init__(self):
            self.policies = []

        def admit(self, prompt):
            return True

        def observe(self, group):
            self.policies.append((group.policy, group.staleness))

        def on_version(self, version):
            self.policies.append(version)

        def state(self):
            return {}

        def restore(self, state):
            pass

    curator = Seen()
    world = make_world(policies=OWN, hooks=Hooks(curators=[("seen", curator)]))
    world.play_all()
    assert set(curator.policies) == {("main", 0)}
    world.commit(world.batch(policy="other"))
    world.commit(world.batch())
    assert curator.policies[-1] == 1


# ---------------------------------------------------------------- no barrier


def test_a_slow_trainer_stops_no_fast_one_and_what_is_too_much_for_it_expires(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1, "batch_groups": 1})
    world = make_world(policies=rules)
    for _ in range(8):
        world.step()
    assert world.head == 8
    ready = world.ledger.shares.count("other", "ready")
    assert ready == rules["other"].most_ready == 4
    counts = world.check()
    assert counts["shares.other.expired.surplus"] == counts["shares"] // 2 - ready
    query = "SELECT DISTINCT oldest FROM shares WHERE stream = 'other' AND state = 'ready'"
    assert [row["oldest"] for row in world.ledger.db.all(query)] == [0]  # its own policy has not moved
    world.commit(world.batch(policy="other"))
    assert world.group("t000000") == ("trained", "")


def test_back_pressure_of_a_single_trainer_closes_the_tap(make_world):
    world = make_world(staleness=1)
    assert world.play_all() == 8
    assert world.ledger.db.counter("admitted.train") == 4
    assert "4 of at most 4 groups are outstanding" in world.ledger.why_no_tasks("n0", {POLICY: 0})


def test_a_policy_that_has_done_its_steps_takes_nothing_more(make_world):
    rules = policies(main={"staleness": 1, "total_steps": 3}, other={"staleness": 1, "total_steps": 1})
    world = make_world(policies=rules)
    world.step("other")
    assert world.ledger.phase == "training"
    assert world.ledger.shares.count("other", "ready") == 0
    assert world.ask(policy="other").waiting_for == "nothing: other has done its steps"
    world.step()
    assert world.check()["shares.other.expired.policy_done"] > 0
    world.step()
    world.step()
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "done")
    counts = world.check()
    assert (counts["main.steps"], counts["other.steps"], counts["train.outstanding"]) == (3, 1, 0)


def test_what_was_played_since_the_last_step_is_not_kept_for_a_policy_that_is_done(make_world):
    rules = policies(main={"staleness": 1, "total_steps": 30}, other={"staleness": 1, "total_steps": 1})
    world = make_world(policies=rules)
    world.step("other")
    for _ in range(4):
        world.step()
    assert world.ledger.db.value("SELECT count(*) FROM recent WHERE stream = 'other'") == 0


def test_out_of_prompts_every_stream_serves_what_it_has(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1})
    world = make_world(policies=rules, source=prompts(3), epochs=1)
    world.play_all()
    for policy in ("main", "other"):
        world.commit(world.batch(policy=policy))
        batch = world.batch(policy=policy)
        assert len(groups_of(batch)) == 1
        world.commit(batch)
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "out of prompts")


def test_the_status_tells_of_every_policy(make_world):
    world = make_world(policies=OWN)
    world.step("other")
    told = status(world.ledger, [])
    assert (told.steps, told.versions) == (0, {"main": 0, "other": 1})
    assert (told.policies["other"].steps, told.policies["other"].wait_fraction) == (1, 0.75)
    assert told.policies["main"].ready == told.counts["ready"] == 4
    assert told.counts["other.trained"] == 2


# ---------------------------------------------------------------- staleness


def test_a_node_must_be_within_the_bound_of_every_policy(make_world):
    world = make_world(policies=policies(main={"staleness": 2}, other={"staleness": 1}))
    for _ in range(2):
        world.step("other")
    assert world.lease(versions={"other": 0}) == []
    assert "the bound is 1" in world.ledger.why_no_tasks("n0", {"main": 0, "other": 0})
    assert "no live version of other" in world.ledger.why_no_tasks("n0", {"main": 0})
    assert world.lease(1, versions={"other": 1})


def test_staleness_counts_the_producers_versions(make_world):
    rules = policies(main={"staleness": 1, "trains_on": ("other",)}, other={"staleness": 3})
    world = make_world(policies=rules)
    world.play_all()
    for _ in range(2):
        world.commit(world.batch(policy="other"))
    assert world.ask().batch is None  # two versions of `other` behind
    counts = world.check()
    assert counts["shares.main.expired.stale"] > 0
    world.play_all()
    assert {entry.staleness for entry in world.batch().samples} == {0}


def test_on_policy_shares_are_played_again_unless_another_stream_has_trained_on_the_group(make_world):
    world = make_world(policies=policies(main={}, other={}))
    world.play_all()
    world.commit(world.batch(groups=1))
    assert (world.group("t000001"), world.share("t000001", "other")) == (("playing", ""), ("none", ""))
    world.play_all()
    world.commit(world.batch(groups=1))
    batch = world.batch(groups=1, policy="other")
    assert groups_of(batch) == {("t000000", "other")}
    world.commit(batch)
    assert world.share("t000001", "other") == ("expired", "stale")
    assert world.group("t000001") == ("trained", "")


# ---------------------------------------------------------------- lineage


def test_a_rollback_of_one_policy_leaves_what_others_trained(make_world):
    world = make_world(policies=OWN)
    world.step()
    world.step("other")
    joined = world.join(0)
    assert (joined.rolled_back, joined.orphaned) == (2, [1])
    assert world.share("t000000", "main") == ("ready", "")
    assert world.share("t000000", "other") == ("trained", "")
    assert world.ledger.heads == {"main": 0, "other": 1}
    batch = world.batch()
    assert {entry.group for entry in batch.samples} == {"t000000", "t000001"}
    world.commit(batch)
    assert world.check()["rolled_back"] == 2


def test_what_dead_weights_sampled_expires_where_another_stream_has_trained_on_it(make_world):
    world = make_world(policies=OWN)
    world.step()
    world.play_all()  # by version 1 of main
    dead = {row["grp"] for row in world.ledger.db.all("SELECT grp FROM shares WHERE producer = 'main' AND oldest = 1")}
    assert dead
    for _ in range(2):
        world.commit(world.batch(policy="other"))
    taken = {row["grp"] for row in world.ledger.db.all("SELECT grp FROM shares WHERE state = 'trained'")} & dead
    world.join(0)
    for group in dead - taken:
        assert world.group(group)[0] == "playing"
    for group in taken:
        assert world.share(group, "main") == ("expired", "rolled_back")
        assert world.share(group, "other") == ("trained", "")
    world.check()


def test_a_share_whose_episodes_span_versions_that_died_is_served(make_world):
    world = make_world(policies=policies(main={"staleness": 4}, other={"staleness": 4}))
    world.step()
    first, second = world.lease(2)  # by version 1
    world.done(first)
    world.step()
    world.join(1)  # version 2 died
    world.commit(world.batch())
    world.done(second)
    group = first.task.group
    row = world.ledger.db.one("SELECT oldest, newest FROM shares WHERE grp = ? AND producer = 'main'", (group,))
    assert tuple(row) == (1, 3)
    for groups in (10, 1):
        world.commit(world.batch(groups, policy="other"))
    assert world.share(group, "other") == ("trained", "")
    while world.share(group, "main") == ("ready", ""):
        world.play_all()
        world.commit(world.batch())
    assert world.share(group, "main") == ("trained", "")


def test_another_trainers_commit_takes_no_version_for_dead_that_is_committed_in_a_moment(make_world):
    rules = policies(main={"staleness": 4, "trains_on": ("main", "other")}, other={"staleness": 4})
    world = make_world(policies=rules)
    for lease in world.lease(8):
        world.done(lease, version=1)  # main has published 1
    world.play_all()
    world.commit(world.batch(policy="other"))
    assert "rerun.rolled_back" not in world.ledger.steps.counters()
    assert world.share("t000000", "main") == ("ready", "")


def test_a_node_on_a_dead_version_of_any_policy_gets_nothing(make_world):
    world = make_world(policies=OWN)
    world.step("other")
    world.join(0, policy="other")
    assert world.lease(versions={"other": 1}) == []
    assert "no live version of other" in world.ledger.why_no_tasks("n0", {"main": 0, "other": 1})
    assert "no live version" not in world.ledger.why_no_tasks("n0", {"main": 0, "other": 0})


def test_a_version_of_another_policy_that_is_not_committed_yet_waits(make_world):
    rules = policies(main={"staleness": 1, "trains_on": ("other",)}, other={"staleness": 1})
    world = make_world(policies=rules)
    for lease in world.lease(4):
        early = sample(1, policy="other", row=world.row())  # published by a trainer that commits in a moment
        world.done(lease, samples=[sample(0, row=world.row()), early])
    assert world.ask().batch is None
    assert world.share("t000000", "other", "main") == ("ready", "")
    for lease in world.lease():
        world.done(lease)
    batch = world.batch(policy="other")
    world.commit(batch)
    assert groups_of(world.batch()) <= {(f"t{n:06d}", "other") for n in range(4)}


def test_evaluations_name_the_versions_of_all_policies(make_world):
    world = make_world(policies=OWN, heldout=prompts(1, "h"), evaluate_every=1)
    world.play_all()
    world.commit(world.batch(policy="other"))
    world.commit(world.batch())
    assert {lease.task.lane for lease in world.lease(2, versions={"other": 0})} == {"train"}
    evaluation = next(lease for lease in world.lease(2) if lease.task.lane == "eval")
    world.join(0, policy="other")  # the round goes on with the version that lives
    assert not world.done(evaluation, samples=[sample(1, policy="other", row=world.row())]).accepted
    again = next(lease for lease in world.lease(9) if lease.task.lane == "eval")
    world.done(again)
    assert [found.version for found in world.ledger.evaluations.results()] == [0, 1]


def test_other_routes_after_a_restart_serve_nothing_that_was_released(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1, "trains_on": ("main",)})
    world = make_world(policies=rules, group_size=4, hooks=Hooks())
    first, *others = world.lease(4)
    world.done(first)  # no stream wants what `other` has sampled
    world.ledger.commit()
    world.rules = changed(world.rules, policies=OWN)
    world.crash()
    for lease in others:
        world.done(lease)
    assert world.share("t000000", "other") == ("none", "")
    assert world.share("t000000", "main") == ("ready", "")
    world.check()


def test_rules_that_contradict_themselves(make_world):
    with pytest.raises(ConfigError, match="trains on nobody"):
        Rules.single("main", trains_on=("nobody",))
    world = make_world()
    with pytest.raises(BadRequest, match="no policy"):
        world.done(world.lease(1)[0], samples=[sample(0, policy="nobody")])
    world.ledger.commit()
    real, world.rules = world.rules, changed(world.rules, policies=policies(other={}))
    with pytest.raises(ConfigError, match="no longer has"):
        world.open()
    world.rules = real

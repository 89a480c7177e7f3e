"""Payloads: which rows are kept, what happens when they are damaged or their unit is gone, and when segments go."""

from __future__ import annotations

import math

import pytest

from dataflow_world import policies, prompts, sample
from rillflow.dataflow.hooks.running import Hooks
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import Row, UnitBeat, UnitInfo


def two(world_policies=None):
    return world_policies or policies(main={"staleness": 1}, other={"staleness": 1})


# ---------------------------------------------------------------- units


def test_units_are_told_the_least_loaded_first_and_forgotten_when_silent(make_world):
    world = make_world(unit_timeout=60.0)
    world.unit("a", load=5.0)
    world.unit("b", load=2.0)
    assert [info.unit for info in world.ledger.units().units] == ["u", "b", "a"]
    world.clock.time += 40
    world.unit("a")
    world.clock.time += 40
    world.ledger.expire()
    assert [info.unit for info in world.ledger.units().units] == ["a"]
    with pytest.raises(BadRequest):
        world.ledger.unit_beat(UnitBeat(info=UnitInfo(unit="", path="")))


def test_a_load_that_is_no_number_is_refused_and_takes_nothing_else_back(make_world):
    world = make_world()
    world.lease(1)
    with pytest.raises(BadRequest, match="load"):
        world.ledger.unit_beat(UnitBeat(info=UnitInfo(unit="v", path="", load=math.nan)))
    assert world.task("t000000.0") == "leased"


def test_a_completion_in_an_unknown_unit_is_played_again(make_world):
    world = make_world()
    lease = world.lease(1)[0]
    ack = world.done(
        lease, samples=[sample(0, row=world.row()), sample(0, row=Row(unit="x", segment=0, offset=0, length=8))]
    )
    assert (ack.accepted, ack.reason) == (False, "payload_gone: the task is played again")
    assert world.task(lease.task.id) == "pending"
    assert world.segment() == (0, "live")
    assert world.done(world.lease(1)[0]).accepted


def test_a_node_that_writes_to_nowhere_does_not_do_so_for_ever(make_world):
    world = make_world(group_size=1, batch_groups=1)
    for _ in range(world.rules.most_returns):
        (lease,) = world.lease()
        assert not world.done(lease, samples=[sample(0, row=world.row("nowhere"))]).accepted
    assert world.group("t000000") == ("failed", "payload_gone")


def test_a_unit_has_its_time_to_be_heard_of_after_a_restart(make_world):
    world = make_world(unit_timeout=60.0)
    world.play_all()
    world.ledger.commit()
    world.clock.time += 3600
    world.crash()
    world.ledger.expire()
    assert len(world.batch().samples) == 4


def test_what_lay_on_a_unit_that_is_gone_is_played_again(make_world):
    world = make_world(staleness=1, unit_timeout=60.0)
    world.unit("v")
    leases = world.lease()
    for lease in leases[:5]:
        world.done(lease, samples=[sample(0, row=world.row("v"))])
    for lease in leases[5:7]:
        world.done(lease)
    batch = world.batch()
    world.clock.time += 61
    world.unit()
    world.beat([lease.attempt for lease in leases])
    world.ledger.expire()
    assert world.ledger.steps.counters()["rerun.unit_gone"] == 5
    assert {world.task(lease.task.id) for lease in leases[:5]} == {"pending"}
    with pytest.raises(LeaseLost):
        world.commit(batch)
    assert world.check()["quarantined"] == 5
    again = world.lease()
    assert not world.done(again[0], samples=[sample(0, row=world.row("v"))]).accepted
    world.unit("v")  # it comes back
    assert world.done(world.lease(1)[0], samples=[sample(0, row=world.row("v"))]).accepted


# ---------------------------------------------------------------- damage


def test_damaged_rows_are_set_aside_and_their_episodes_played_again(make_world):
    world = make_world()
    world.play_all()
    batch = world.batch()
    bad = batch.samples[1]
    assert world.lose(bad.row, Row(unit="nobody", segment=9, offset=9, length=9)).accepted
    assert world.task("t000000.1") == "pending"
    assert (world.group("t000000")[0], world.group("t000001")) == ("playing", ("ready", ""))
    with pytest.raises(LeaseLost):
        world.commit(batch)
    world.lose(bad.row)  # reported twice
    row = world.ledger.db.one("SELECT * FROM quarantine")
    assert (row["sample"], row["reason"], row["offset"]) == (bad.id, "checksum", bad.row.offset)
    (lease,) = world.lease()
    assert lease.attempt == "t000000.1-2"
    world.done(lease)
    world.commit(world.batch())
    counts = world.check()
    assert (counts["quarantined"], counts["train.trained"]) == (1, 2)
    assert world.ledger.steps.counters()["released.damaged"] == 1


def test_damage_in_a_playing_group(make_world):
    world = make_world()
    lease, other, *_ = world.lease()
    world.done(lease)
    world.lose(world.row_of(lease.attempt))
    assert (world.task(lease.task.id), world.task(other.task.id)) == ("pending", "leased")


def test_damage_expires_what_is_left_of_a_group_that_another_stream_has_trained_on(make_world):
    world = make_world(policies=two())
    world.play_all()
    world.commit(world.batch())
    batch = world.batch(policy="other")
    world.lose(batch.samples[0].row)
    assert world.share(batch.samples[0].group, "other") == ("expired", "damaged")
    assert world.group(batch.samples[0].group) == ("trained", "")
    with pytest.raises(LeaseLost):
        world.commit(batch)
    world.check()


def test_damage_of_what_is_trained_is_noted_and_played_again_after_a_rollback(make_world):
    world = make_world(staleness=1)
    batch = world.step()
    world.lose(batch.samples[0].row)
    assert world.group("t000000") == ("trained", "")
    assert world.join(0).rolled_back == 2
    assert (world.group("t000000"), world.group("t000001")) == (("playing", ""), ("ready", ""))
    assert world.ledger.steps.counters()["rerun.payload_gone"] == 2
    world.step()


def test_damage_in_an_evaluation_changes_no_result(make_world):
    world = make_world(heldout=prompts(1, "h"))
    lease = world.lease(1)[0]
    world.done(lease, reward=1.0)
    world.lose(world.row_of(lease.attempt))
    assert [found.reward for found in world.ledger.evaluations.results()] == [1.0]


# ---------------------------------------------------------------- release


def live(world):
    return world.segment()[0]


def test_rows_are_kept_until_no_checkpoint_needs_them(make_world):
    world = make_world(staleness=1)
    world.play_all()
    assert live(world) == 8
    world.commit(world.batch())
    assert live(world) == 8
    world.commit(world.batch(), restorable=1)  # the batch of version 1 is never asked for again
    assert live(world) == 4
    world.play_all()
    world.commit(world.batch(), restorable=3)
    assert live(world) == 2 * 2
    world.check()


def test_a_rollback_behind_what_was_kept_plays_again(make_world):
    world = make_world(staleness=1)
    world.play_all()
    world.commit(world.batch())
    world.commit(world.batch(), restorable=2)
    assert world.join(0).rolled_back == 4
    assert {world.group(f"t{n:06d}")[0] for n in range(4)} == {"playing"}
    world.step()
    world.check()


def test_a_rollback_behind_what_was_kept_plays_again_what_any_policy_has_sampled(make_world):
    rules = policies(main={"staleness": 1, "trains_on": ("main", "other")}, other={"total_steps": 0})
    world = make_world(policies=rules, group_size=6, hooks=Hooks())

    def play():
        while leases := world.lease(6):
            for lease in leases:
                mine = [sample(0, row=world.row())] if lease.task.place < 4 else []
                others = [sample(0, policy="other", row=world.row())] if lease.task.place >= 2 else []
                world.done(lease, samples=mine + others)

    play()
    world.commit(world.batch(), restorable=1)
    world.join(0)
    assert {world.task(f"t000000.{place}") for place in range(6)} == {"pending"}
    play()
    assert len(world.batch().samples) == 8


def test_rows_are_released_with_the_last_share_that_holds_them(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1, "trains_on": ("main",)})
    world = make_world(policies=rules)
    for lease in world.lease(4):
        world.done(lease, samples=[sample(0, row=world.row())])
    world.commit(world.batch(), restorable=1)
    assert live(world) == 4
    world.commit(world.batch(policy="other"), restorable=1)
    assert live(world) == 0


def test_rows_of_what_is_not_trained_are_released_at_once(make_world):
    world = make_world(attempts=1)
    filtered, failed = world.lease(2), world.lease(2)
    for lease in filtered:
        world.done(lease, reward=1.0)
    assert (world.group("t000000"), live(world)) == (("filtered", "zero_variance"), 0)
    world.done(failed[0])
    assert live(world) == 1
    world.fail(failed[1])
    assert (world.group("t000001")[0], live(world)) == ("failed", 0)
    tool = sample(0, trained=0, row=world.row())
    world.done(world.lease(1)[0], samples=[sample(0, row=world.row()), tool])
    assert live(world) == 1


def test_rows_of_an_evaluation_are_kept_as_long_as_it_runs(make_world):
    world = make_world(heldout=prompts(2, "h"))
    first, second, *_ = world.lease()
    world.done(first)
    assert live(world) == 1
    world.done(second)
    assert live(world) == 0


def test_rows_of_a_run_that_ended_are_released_but_for_its_last_checkpoints(make_world):
    world = make_world(staleness=1, total_steps=1)
    world.play_all()
    world.commit(world.batch(), restorable=1)
    assert (world.ledger.phase, live(world)) == ("ended", 0)


# ---------------------------------------------------------------- segments


def test_a_segment_that_nobody_needs_is_dropped_after_a_while(make_world):
    world = make_world(staleness=1, drop_after=600.0, batch_lease=1e9)
    world.play_all()
    world.commit(world.batch())
    world.commit(world.batch(), restorable=2)
    assert world.segment() == (0, "live")
    world.ledger.expire()
    assert world.unit() == []
    world.clock.time += 601
    world.ledger.expire()
    assert world.unit() == [0]
    assert world.unit() == [0]  # repeated until it is done
    lease = world.lease(1, version=2)[0]
    assert not world.done(lease).accepted
    assert world.unit(dropped=[0, 7]) == []
    assert world.segment() == (0, "dropped")
    lease = world.lease(1, version=2)[0]
    assert not world.done(lease).accepted
    lease = world.lease(1, version=2)[0]
    assert world.done(lease, samples=[sample(2, row=world.row(segment=1))]).accepted


def test_a_segment_that_is_still_written_stays_however_idle(make_world):
    world = make_world(staleness=1, drop_after=600.0, batch_lease=1e9)
    world.play_all()
    world.commit(world.batch())
    world.commit(world.batch(), restorable=2)
    world.clock.time += 601
    assert world.unit(writing=True) == []
    lease = world.lease(1, version=2)[0]
    assert world.done(lease).accepted
    assert world.unit() == []
    assert world.segment() == (1, "live")


def test_a_segment_that_was_idle_when_its_unit_was_asked_may_be_needed_when_it_answers(make_world):
    world = make_world(staleness=1, drop_after=600.0, batch_lease=1e9)
    world.play_all()
    world.commit(world.batch())
    world.commit(world.batch(), restorable=2)
    world.clock.time += 601
    info = UnitInfo(unit="u", path="/units/u")
    idle = world.ledger.unit_beat(UnitBeat(info=info)).idle
    assert idle == [0]
    assert world.done(world.lease(1, version=2)[0]).accepted
    assert world.ledger.unit_beat(UnitBeat(info=info, closed=idle)).drop == []


def test_segments_of_news_that_came_too_late_are_dropped_too(make_world):
    world = make_world(drop_after=600.0)
    lease = world.lease(1)[0]
    world.clock.time += 60
    world.ledger.expire()
    assert not world.done(lease, samples=[sample(0, row=world.row(segment=5))]).accepted
    world.clock.time += 601
    world.ledger.expire()
    assert world.unit() == [5]


def test_no_segment_goes_before_its_time_when_the_clock_was_set(make_world):
    world = make_world(drop_after=600.0)
    lease = world.lease(1)[0]
    world.done(lease, samples=[sample(0, trained=0, row=world.row(segment=5))])
    world.clock.time += 7200
    world.ledger.grace()
    world.ledger.expire()
    assert world.unit() == []


# ---------------------------------------------------------------- completions


def test_an_attempt_that_was_completed_is_not_completed_otherwise(make_world):
    world = make_world()
    lease = world.lease(1)[0]
    assert world.done(lease).accepted
    assert world.done(lease).accepted
    with pytest.raises(LeaseLost, match="another payload"):
        world.done(lease, reward=5.0)
    assert world.check()["samples"] == 1

"""Batches in parts, parts for ranks, and what is served again."""

from __future__ import annotations

import pytest

from dataflow_world import policies, prompts, sample
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import Replay
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import RenewBatch


def play(world, groups):
    """Play the first `count` pending groups."""
    for lease in world.lease(groups * world.rules.group_size):
        world.done(lease)


def _names(batch):
    return [entry.group for entry in batch.samples]


# ---------------------------------------------------------------- parts


def test_a_batch_grows_as_groups_become_ready(make_world):
    world = make_world(staleness=1, batch_groups=3)
    assert world.ask("x", least=1).batch is None
    play(world, 1)
    first = world.ask("x", least=1).batch
    assert (first.groups, first.complete, set(_names(first))) == (1, False, {"t000000"})
    assert world.ask("x", least=1, have=1).batch is None
    assert "0 of 3 groups ready" in world.ask("x", least=1, have=1).waiting_for
    play(world, 1)
    second = world.ask("x", least=1, have=1).batch
    assert (second.id, second.groups, second.complete, set(_names(second))) == (first.id, 2, False, {"t000001"})
    with pytest.raises(BadRequest, match="2 of 3 groups"):
        world.commit(second)
    play(world, 2)
    third = world.ask("x", least=1, have=2).batch
    assert (third.groups, third.complete, set(_names(third))) == (3, True, {"t000002"})
    assert world.ask("x", least=1, have=3).batch.samples == []
    assert world.ask("x", least=1).batch.samples == first.samples + second.samples + third.samples
    world.commit(third)
    assert world.check()["main.members.fresh"] == 3
    assert world.share("t000003", "main") == ("ready", "")


def test_a_part_has_as_many_groups_as_asked_for_at_least_or_what_is_missing(make_world):
    world = make_world(staleness=1, batch_groups=3)
    play(world, 1)
    assert world.ask("x", least=2).batch is None
    play(world, 1)
    assert world.ask("x", least=2).batch.groups == 2
    play(world, 1)
    assert world.ask("x", least=2, have=2).batch.complete


def test_a_batch_in_parts_ends_when_nothing_more_can_come(make_world):
    world = make_world(staleness=1, batch_groups=3, source=prompts(2), epochs=1)
    play(world, 1)
    assert not world.ask("x", least=1).batch.complete
    for lease in world.lease():
        world.done(lease, reward=1.0)  # equal rewards: filtered
    batch = world.ask("x", least=1, have=1).batch
    assert (batch.samples, batch.groups, batch.complete) == ([], 1, True)
    world.commit(batch)
    assert world.ledger.reason == "out of prompts"


def test_on_policy_parts_come_in_order_of_admission(make_world):
    world = make_world(batch_groups=3)
    first, second, third = (leases[0:2] for leases in (world.lease(2), world.lease(2), world.lease(2)))
    for lease in second:
        world.done(lease)
    assert world.ask("x", least=1).batch is None
    for lease in first:
        world.done(lease)
    assert set(_names(world.ask("x", least=1).batch)) == {"t000000", "t000001"}
    for lease in third:
        world.done(lease)
    batch = world.ask("x", least=1, have=2).batch
    assert batch.complete
    world.commit(batch)


def test_asks_that_cannot_be(make_world):
    world = make_world(staleness=1)
    play(world, 1)
    with pytest.raises(LeaseLost, match="no batch of this attempt"):
        world.ask("x", least=1, have=1)
    world.ask("x", least=1)
    with pytest.raises(BadRequest, match="has 1 groups, not 2"):
        world.ask("x", least=1, have=2)
    for wrong in ({"rank": 1}, {"ranks": 0}, {"have": -1}, {"least": -1}, {"ranks": 10**9}):
        with pytest.raises(BadRequest):
            world.ask("y", **wrong)


def test_a_lost_part_loses_the_batch(make_world):
    world = make_world(staleness=1)
    play(world, 1)
    part = world.ask("x", least=1).batch
    world.lose(part.samples[0].row)
    with pytest.raises(LeaseLost):
        world.ask("x", least=1, have=1)
    world.play_all()
    assert world.batch().complete


def test_a_lease_is_renewed_while_its_holder_works(make_world):
    world = make_world()
    world.play_all()
    batch = world.batch()
    for _ in range(3):
        world.clock.time += 250
        world.ledger.renew_batch(RenewBatch(batch=batch.id, attempt=batch.attempt))
        world.ledger.expire()
    world.clock.time += 301
    world.ledger.expire()
    with pytest.raises(LeaseLost):
        world.ledger.renew_batch(RenewBatch(batch=batch.id, attempt=batch.attempt))


# ---------------------------------------------------------------- ranks


def play_sized(world, groups, sizes):
    for lease in world.lease(groups * world.rules.group_size):
        world.done(lease, samples=[sample(0, row=world.row(), tokens=next(sizes))])


@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_share_a_batch_by_tokens_the_same_whenever_they_ask(make_world, parts):
    world = make_world(staleness=1, batch_groups=4, group_size=4)
    sizes = iter([900, 10, 20, 30, 500, 400, 15, 25] * 9)
    ranks, least = range(3), parts - 1
    seen = {rank: [] for rank in ranks}
    for have in range(0, 4, 4 // parts):
        play_sized(world, 4 // parts, sizes)
        for rank in ranks:
            seen[rank] += world.ask("x", least=least, have=have, rank=rank, ranks=3).batch.samples
    everything = world.ask("x", least=least).batch
    assert everything.complete
    assert sorted(entry.id for part in seen.values() for entry in part) == sorted(e.id for e in everything.samples)
    for rank in ranks:
        assert world.ask("x", least=least, rank=rank, ranks=3).batch.samples == seen[rank]
    loads = [sum(entry.tokens for entry in part) for part in seen.values()]
    assert max(loads) - min(loads) <= 900


# ---------------------------------------------------------------- replay


def replaying(**options):
    return Hooks(filters=[("zero_variance", ZeroVariance())], sampler=Replay(**options))


def test_a_replayer_gets_trained_groups_served_again(make_world):
    world = make_world(staleness=1, batch_groups=2, hooks=replaying(ratio=0.5, pool=4, staleness=2))
    first = world.step()
    assert not any(entry.replayed for entry in first.samples)
    second = world.step()
    again = {entry.group for entry in second.samples if entry.replayed}
    assert len(again) == 1
    assert again <= set(_names(first))
    assert world.share(again.pop(), "main") == ("trained", "")
    counts = world.check()
    assert (counts["main.members.fresh"], counts["main.members.replayed"], counts["train.trained"]) == (3, 1, 3)
    assert world.ledger.db.value("SELECT max(served) FROM shares") == 2
    for _ in range(4):
        batch = world.step()
        assert all(entry.staleness <= (2 if entry.replayed else 1) for entry in batch.samples)


def test_a_rollback_takes_back_what_was_served_again(make_world):
    world = make_world(staleness=1, batch_groups=2, hooks=replaying(ratio=0.5, pool=4, staleness=4))
    world.step()
    world.step()
    joined = world.join(0)
    assert joined.rolled_back == 3
    assert world.ledger.db.value("SELECT max(served) FROM shares") == 0
    assert not any(entry.replayed for entry in world.step().samples)


def test_the_part_that_is_served_again_opens_a_batch(make_world):
    world = make_world(staleness=1, batch_groups=2, hooks=replaying(ratio=0.5, pool=4, staleness=4))
    world.step()
    world.ledger.db.run("UPDATE shares SET todo = 1 WHERE state = 'ready'")  # nothing fresh is ready
    part = world.ask("x", least=1).batch
    assert (part.groups, part.complete, {entry.replayed for entry in part.samples}) == (1, False, {True})
    world.ledger.db.run("UPDATE shares SET todo = 0")
    rest = world.ask("x", least=1, have=1).batch
    assert (rest.complete, {entry.replayed for entry in rest.samples}) == (True, {False})
    world.commit(rest)


def test_nothing_is_replayed_for_ever_once_prompts_run_out(make_world):
    hooks = replaying(ratio=0.5, pool=4, staleness=9)
    world = make_world(staleness=1, batch_groups=2, hooks=hooks, source=prompts(2), epochs=1)
    world.step()
    assert (world.ledger.phase, world.ledger.reason) == ("ended", "out of prompts")


def test_rows_of_the_pool_are_kept_though_no_checkpoint_needs_them(make_world):
    world = make_world(staleness=1, batch_groups=2, hooks=replaying(ratio=0.5, pool=2, staleness=9))
    for _ in range(5):
        world.step(restorable=world.head)
    kept = world.ledger.db.value("SELECT count(*) FROM shares WHERE state = 'trained' AND held = 1")
    assert kept == 2
    world.check()


def test_a_damaged_group_is_not_replayed(make_world):
    world = make_world(staleness=1, batch_groups=2, hooks=replaying(ratio=0.5, pool=9, staleness=9))
    first = world.step()
    world.play_all()
    batch = world.batch()
    again = next(entry for entry in batch.samples if entry.replayed)
    world.lose(again.row)
    with pytest.raises(LeaseLost):
        world.commit(batch)
    other = next(entry.group for entry in first.samples if entry.group != again.group)
    assert {entry.group for entry in world.batch().samples if entry.replayed} == {other}


def test_policies_replay_their_own(make_world):
    rules = policies(main={"staleness": 1}, other={"staleness": 1})
    world = make_world(policies=rules, hooks=replaying(ratio=0.5, pool=4, staleness=4))
    for _ in range(2):
        for policy in ("main", "other"):
            batch = world.step(policy)
            assert {entry.policy for entry in batch.samples} == {policy}
    assert world.check()["other.members.replayed"] == 1

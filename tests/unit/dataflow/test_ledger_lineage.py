"""Versions, rollbacks and restarts: the state after a restart of a trainer or a service."""

from __future__ import annotations

import pytest

from dataflow_world import POLICY, sample
from rillflow.errors import BadRequest, DiskFull, LeaseLost, StorageError
from rillflow.types import JoinTrainer

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
    assert world.head == 2


def test_a_late_copy_of_a_former_trainers_join_takes_nothing_back(make_world):
    world = make_world()
    former = JoinTrainer(policy=POLICY, incarnation=world.incarnation, checkpoint=0)
    world.join()
    world.step()
    world.ledger.commit()
    world.crash()
    with pytest.raises(LeaseLost, match="another trainer"):
        world.ledger.join_trainer(former)
    assert world.head == 1
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
    assert "no live version" in world.ledger.why_no_tasks("n0", {POLICY: 1})
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
    assert world.head == 2


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
    assert (world.ledger.phase, world.head) == ("ended", 3)


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

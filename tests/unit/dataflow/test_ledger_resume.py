"""The state after a stop, a restart under other rules, a rollback: each item once, nothing stuck."""

from __future__ import annotations

import os
import sqlite3

import pytest

from dataflow_world import changed, prompts, sample
from rillflow.dataflow.hooks.running import Hooks
from rillflow.errors import CorruptData


def test_a_commit_syncs_the_log_that_it_was_written_to(make_world, monkeypatch):
    ledger = make_world().ledger
    db = ledger.db
    assert (db.value("PRAGMA journal_mode"), db.value("PRAGMA synchronous")) == ("wal", 1)
    synced = []

    def fdatasync(descriptor):
        synced.append((os.path.realpath(f"/proc/self/fd/{descriptor}"), db.dirty))
        real(descriptor)

    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with db.change():
        db.count("anything")
    ledger.commit()
    assert synced == [(os.path.realpath(f"{db.path}-wal"), False)]


def test_groups_played_by_weights_that_the_line_passed_over_are_played_again(make_world):
    """Their group became ready while a batch was leased: nothing else reads it before it is served."""
    world = make_world(staleness=2)
    for lease in world.lease(4):
        world.done(lease)
    batch = world.batch()
    leases = world.lease(4, version=1)  # published by a trainer that died before its commit
    for lease in leases:
        world.done(lease, samples=[sample(1)])
    assert world.group("t000002") == ("ready", "")
    world.commit(batch, version=3)
    assert {world.group(lease.task.group) for lease in leases} == {("playing", "")}
    world.step()


def test_tokens_of_a_version_above_the_trainers_are_not_served(make_world):
    """A trainer that was replaced publishes once more, after the join that asked what was published."""
    world = make_world(staleness=1)
    for lease in world.lease(version=1)[:4]:
        world.done(lease, version=1)
    assert world.group("t000000") == ("ready", "")
    assert world.ask().batch is None
    assert world.group("t000000") == ("playing", "")


def test_a_step_tells_the_reward_of_what_was_played_since_the_one_before(make_world):
    world = make_world(group_size=1)
    for reward in (1.0, 3.0):
        for lease in world.lease():
            world.done(lease, reward)
        world.commit(world.batch())
    world.ledger.commit()
    assert [line["reward"] for _, line in world.ledger.events_after(0)] == [1.0, 3.0]


def test_a_trainer_that_joins_frees_the_batch_of_the_one_before(make_world):
    world = make_world()
    world.play_all()
    world.batch()
    world.join()
    assert world.group("t000000") == ("ready", "")
    assert world.ledger.steps.counters()["released.trainer_restarted"] == 1


def test_a_run_that_now_has_enough_steps_leaves_no_batch_leased(make_world):
    world = make_world()
    world.step()
    world.play_all()
    world.batch()
    world.ledger.commit()
    world.rules = changed(world.rules, total_steps=1)
    world.crash()
    assert (world.ledger.phase, world.check()["train.outstanding"]) == ("ended", 0)


def test_a_narrower_bound_does_not_condemn_what_was_trained_under_the_wider(make_world):
    world = make_world(staleness=2)
    world.step()
    batch = world.step()  # of groups that were played before the first
    world.ledger.commit()
    world.rules = changed(world.rules, staleness=0)
    world.crash()
    world.check()
    assert max(entry.staleness for entry in batch.samples) == 1


def test_a_run_that_failed_too_often_starts_counting_again_when_resumed(make_world):
    world = make_world(max_failures=2)
    for lease in world.lease(2):
        world.fail(lease)
    assert world.ledger.phase == "ended"
    world.ledger.commit()
    world.crash(resume=True)
    assert world.ledger.phase == "training"
    assert world.step().samples


class Strict:
    """Refuses the first 2500 prompts."""

    def __init__(self):
        self.seen = 0

    def admit(self, prompt):
        self.seen += 1
        return self.seen > 2500

    def observe(self, group):
        pass

    def on_version(self, version):
        pass

    def state(self):
        return self.seen

    def restore(self, state):
        self.seen = state


def test_a_strict_curator_blocks_nobody_and_is_asked_on(make_world):
    world = make_world(source=prompts(10), hooks=Hooks(curators=[("strict", Strict())]), join=False)
    skipped = []
    for _ in range(3):
        skipped.append(world.ledger.db.counter("skipped"))
        world.ledger.advance()
    assert skipped == [1000, 2000, 2500]
    assert len(world.lease()) == 4


def test_a_curator_that_admits_nothing_is_named_to_those_who_wait(make_world):
    class Nothing(Strict):
        def admit(self, prompt):
            return False

    world = make_world(hooks=Hooks(curators=[("nothing", Nothing())]))
    skipped = world.ledger.db.counter("skipped")
    told = f"; the last {skipped} prompts were skipped by the curators"
    assert world.ask().waiting_for.endswith(told)
    assert world.ledger.why_no_tasks("n0", world.ledger.heads).endswith(told)
    assert world.ledger.db.counter("cursor") == skipped > 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_batch_leased_before_a_restart_is_committed_once_after_it(make_world, times):
    world = make_world()
    world.play_all()
    batch = world.batch()
    world.ledger.commit()
    for _ in range(times):
        world.crash()
    for _ in range(2):
        assert world.commit(batch, version=1).accepted
    assert (world.head, world.check()["train.trained"]) == (1, 2)


def test_a_ledger_of_another_format_is_refused_before_it_is_touched(make_world, tmp_path):
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    old.execute("CREATE TABLE tasks (id TEXT PRIMARY KEY)")
    old.execute("INSERT INTO meta VALUES ('format', '1')")
    old.commit()
    world = make_world()
    real, world.path = world.path, tmp_path / "old.sqlite"
    with pytest.raises(CorruptData, match="has ledger format 1, this version reads"):
        world.open()
    world.path = real
    assert old.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone() == (2,)
    old.close()

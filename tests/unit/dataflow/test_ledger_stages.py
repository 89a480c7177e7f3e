"""Stages before the update: every share is handled once by each, in any order, before its trainer gets it."""

from __future__ import annotations

import pytest

from dataflow_world import changed, prompts
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import CommitStage, RenewBatch, Row, SampleColumns


@pytest.fixture
def world(make_world):
    world = make_world(staleness=1, stages=("logprobs", "score"))
    world.play_all()
    return world


def test_the_trainer_gets_what_all_stages_have_handled(world):
    assert world.ask().waiting_for.startswith(
        "0 of 2 groups ready, stage logprobs: 4 groups behind, stage score: 4 groups behind"
    )
    first = world.ask_stage("score", "w1", groups=2)
    assert [entry.group for entry in first.samples] == ["t000000"] * 2 + ["t000001"] * 2
    second = world.ask_stage("score", "w2")  # another worker gets others
    assert {entry.group for entry in second.samples} == {"t000002", "t000003"}
    assert world.ask_stage("score", "w3") is None
    assert world.commit_stage(second, "score").accepted
    assert world.ask().batch is None
    assert "stage logprobs: 4 groups behind, stage score: 2 groups behind" in world.ask().waiting_for
    other = world.ask_stage("logprobs", "w4")
    assert [entry.extra for entry in other.samples[:2]] == [[], []]
    assert len(other.samples[-1].extra) == 1  # what the other stage has added so far
    assert world.commit_stage(other, "logprobs").accepted
    batch = world.batch()
    assert {entry.group for entry in batch.samples} == {"t000002", "t000003"}
    assert {len(entry.extra) for entry in batch.samples} == {2}
    world.commit(batch)


def test_a_stage_commits_once_and_a_lost_lease_returns(world):
    batch = world.ask_stage("score", "w1")
    assert world.ask_stage("score", "w1").samples == batch.samples
    world.clock.time += 20
    world.ledger.renew_batch(RenewBatch(batch=batch.id, attempt="w1"))
    world.clock.time += 20
    world.ledger.expire()
    world.clock.time += 31
    world.ledger.expire()
    with pytest.raises(LeaseLost):
        world.commit_stage(batch, "score")
    with pytest.raises(LeaseLost):
        world.ask_stage("score", "w1")
    again = world.ask_stage("score", "w2")
    assert [entry.id for entry in again.samples] == [entry.id for entry in batch.samples]
    for _ in range(2):
        assert world.commit_stage(again, "score").accepted
    assert world.ledger.db.value("SELECT count(*) FROM extras") == len(batch.samples)


def test_what_is_played_again_forgets_what_stages_did(world):
    batch = world.ask_stage("score", "w1")
    world.commit_stage(batch, "score")
    held = world.ask_stage("logprobs", "w2")
    world.lose(batch.samples[0].row)
    assert world.ledger.db.value("SELECT count(*) FROM extras WHERE grp = 't000000'") == 0
    assert world.commit_stage(held, "logprobs").accepted  # passes over what it no longer has
    world.play_all()
    assert {entry.group for entry in world.ask_stage("score", "w3").samples} == {"t000000"}
    assert {entry.group for entry in world.ask_stage("logprobs", "w4").samples} == {"t000000"}
    world.check()


def test_a_lost_row_of_a_stage_is_made_again(world):
    row = world.row(segment=3)
    world.commit_stage(world.ask_stage("logprobs", "w1"), "logprobs")
    batch = world.ask_stage("score", "w2", groups=1)
    columns = [SampleColumns(sample=entry.id, row=row) for entry in batch.samples[:1]]
    news = CommitStage(policy="main", stage="score", batch=batch.id, attempt="w2", columns=columns)
    assert world.ledger.commit_stage(news).accepted
    leased = world.batch(groups=1)
    world.lose(row)
    with pytest.raises(LeaseLost):
        world.commit(leased)
    assert world.group("t000000") == ("ready", "")
    assert "t000000" in {entry.group for entry in world.ask_stage("score", "w3").samples}
    assert world.check()["quarantined"] == 1


def test_rows_of_a_stage_live_as_long_as_their_share(world):
    for stage in ("score", "logprobs"):
        world.commit_stage(world.ask_stage(stage, stage), stage)
    before = world.segment()[0]
    assert before == 8 + 2 * 8
    world.commit(world.batch(), restorable=1)
    assert world.segment()[0] == before - 4 - 8


def test_a_stage_that_writes_where_nothing_can_be_read_does_its_work_again(world):
    batch = world.ask_stage("score", "w1")
    assert not world.commit_stage(batch, "score", Row(unit="nobody", segment=0, offset=0, length=8)).accepted
    assert world.ask_stage("score", "w2").samples == batch.samples


def test_asks_of_stages_that_cannot_be(world):
    with pytest.raises(BadRequest, match="has no stage"):
        world.ask_stage("nothing", "w1")
    with pytest.raises(BadRequest, match="1 group at least"):
        world.ask_stage("score", "w1", groups=0)
    batch = world.ask_stage("score", "w2")
    twice = [SampleColumns(sample=batch.samples[0].id, row=world.row())] * 2
    news = CommitStage(policy="main", stage="score", batch=batch.id, attempt="w2", columns=twice)
    with pytest.raises(BadRequest, match="twice"):
        world.ledger.commit_stage(news)
    with pytest.raises(LeaseLost):
        world.ledger.commit_stage(CommitStage(policy="main", stage="score", batch="s9", attempt="w2", columns=[]))
    with pytest.raises(LeaseLost):
        world.ledger.renew_batch(RenewBatch(batch="s9", attempt="w2"))


def test_the_last_batch_waits_for_what_is_in_stages(make_world):
    world = make_world(staleness=1, stages=("score",), source=prompts(2), epochs=1)
    world.play_all()
    assert world.ask(groups=3).batch is None
    world.commit_stage(world.ask_stage("score", "w1", groups=1), "score")
    assert world.ask(groups=3).batch is None
    world.commit_stage(world.ask_stage("score", "w2"), "score")
    batch = world.batch(groups=3)
    assert (batch.groups, batch.complete) == (2, True)
    world.commit(batch)


def test_other_stages_after_a_restart(make_world):
    world = make_world(staleness=1)
    world.play_all()
    world.ledger.commit()
    world.rules = changed(world.rules, stages=("score",))
    world.crash()
    assert world.ask().batch is None
    world.commit_stage(world.ask_stage("score", "w"), "score")
    world.ledger.commit()
    world.rules = changed(world.rules, stages=())
    world.crash()
    world.commit(world.batch())


def test_a_stage_that_came_with_a_restart_handles_what_was_leased_or_comes_back_trained(make_world):
    world = make_world(staleness=1)
    world.play_all()
    world.commit(world.batch())
    leased = world.batch()
    world.ledger.commit()
    world.rules = changed(world.rules, stages=("score",))
    world.crash()
    with pytest.raises(LeaseLost):
        world.commit(leased)
    world.join(0)
    assert world.ask().batch is None
    world.commit_stage(world.ask_stage("score", "w"), "score")
    batch = world.batch(groups=4)
    assert [len(entry.extra) for entry in batch.samples] == [1] * 8
    world.commit(batch)


def test_rows_of_a_stage_that_went_with_a_restart_are_released_and_nobody_waits_for_it(make_world):
    world = make_world(staleness=1, stages=("score",))
    world.play_all()
    row = world.row()
    world.commit_stage(world.ask_stage("score", "w"), "score", row)
    world.ledger.commit()
    world.rules = changed(world.rules, stages=())
    world.crash()
    assert world.segment()[0] == 8
    world.lose(row)
    for step in (1, 2):
        world.commit(world.batch(), restorable=step)
    assert world.segment()[0] == 0


def test_a_lease_that_a_stage_lost_is_news_to_its_other_workers(world):
    world.ask_stage("score", "w1")
    before = world.ledger.moves
    world.clock.time += 31
    world.ledger.expire()
    assert world.ledger.moves > before

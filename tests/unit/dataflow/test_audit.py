"""The audit: balanced for every honest ledger (see the other tests), not balanced for a tampered one."""

from __future__ import annotations

import pytest
from dataflow_world import prompts

from rillflow.dataflow.audit import audit
from rillflow.errors import RunError, StorageError


@pytest.fixture
def busy(make_world):
    return make_busy(make_world)


def make_busy(make_world):
    world = make_world(staleness=1, heldout=prompts(2, "h"))
    world.step()
    world.step()
    world.join(1)
    world.play_all()
    world.batch()
    world.lease(3)
    return world


HARMS = [
    "DELETE FROM samples WHERE id = 't000000.0.0'",
    "DELETE FROM groups WHERE id = 't000001'",
    "DELETE FROM tasks WHERE id = 't000001.0'",
    "DELETE FROM attempts WHERE task = 't000001.0'",
    "UPDATE groups SET state = 'ready' WHERE id = 't000000'",
    "UPDATE groups SET state = 'nowhere' WHERE id = 't000000'",
    "UPDATE groups SET state = 'failed' WHERE state = 'ready'",
    "UPDATE tasks SET state = 'pending' WHERE id = 't000000.0'",
    "UPDATE tasks SET samples = 2 WHERE id = 't000000.0'",
    "UPDATE samples SET task = 't000001.0' WHERE id = 't000000.0.0'",
    "UPDATE samples SET oldest = -5 WHERE id = 't000000.0.0'",
    "UPDATE batches SET state = 'committed' WHERE state = 'rolled_back'",
    "INSERT INTO batch_groups SELECT b.id, 't000000', 0 FROM batches b WHERE b.state = 'leased'",
    "UPDATE steps SET state = 'live'",
    "UPDATE policies SET version = 2",
    "UPDATE counters SET value = value + 1 WHERE name = 'admitted.train'",
    "UPDATE tally SET n = n + 1 WHERE state = 'trained'",
    "UPDATE groups SET state = 'evaluated' WHERE id = 't000000'",
    "UPDATE groups SET state = 'trained' WHERE lane = 'eval'",
    "UPDATE groups SET state = 'nowhere' WHERE lane = 'eval'",
    "DELETE FROM groups WHERE lane = 'eval'",
    "UPDATE tasks SET state = 'cancelled' WHERE state IN ('pending', 'leased')",
    "UPDATE tasks SET failures = 1 WHERE id = 't000000.0'",
    "UPDATE attempts SET state = 'held' WHERE task = 't000000.0'",
    "INSERT INTO orphans VALUES ('main', -1, 0)",
]


def harmed(world, harm):
    """The audit of the world after the harm."""
    assert world.audit().balanced
    world.ledger.db.run("BEGIN")
    assert world.ledger.db.run(harm) >= 1
    world.ledger.db.commit()
    return world.audit()


@pytest.mark.parametrize("harm", HARMS)
def test_harm_is_noticed(busy, harm):
    report = harmed(busy, harm)
    assert not report.balanced
    wrong = report.to_dict()
    assert wrong["balanced"] is False
    assert any(not identity["ok"] for identity in wrong["identities"])
    busy.check = lambda: None  # the fixture need not look again


def test_every_identity_can_fail(make_world):
    """An identity that no harm breaks proves nothing."""
    names, broken = set(), set()
    for harm in HARMS:
        world = make_busy(make_world)
        report = harmed(world, harm)
        names |= {identity.name for identity in report.identities}
        broken |= {identity.name for identity in report.identities if not identity.ok}
        world.check = lambda: None
    assert names - broken == set()


def test_the_audit_reads_beside_a_running_ledger_and_sees_what_was_committed(make_world):
    world = make_world()
    world.ledger.commit()
    world.play_all()  # in the open transaction
    assert audit(world.path).counts["samples"] == 0
    assert world.check()["samples"] == 4


def test_no_ledger_and_no_database(tmp_path):
    with pytest.raises(RunError, match="there is no ledger"):
        audit(tmp_path / "ledger.sqlite")
    (tmp_path / "odd ?#%.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(StorageError, match="damaged"):
        audit(tmp_path / "odd ?#%.sqlite")

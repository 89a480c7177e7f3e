"""The audit: balanced for every honest ledger (see the other tests), not balanced for a tampered one."""

from __future__ import annotations

import pytest
from dataflow_world import prompts

from rillflow.dataflow.audit import audit
from rillflow.errors import RunError, StorageError


@pytest.fixture
def busy(make_world):
    world = make_world(staleness=1, heldout=prompts(2, "h"))
    world.step()
    world.step()
    world.join(1)
    world.play_all()
    world.batch()
    world.lease(3)
    return world


@pytest.mark.parametrize(
    "harm",
    [
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
    ],
)
def test_harm_is_noticed(busy, harm):
    assert busy.audit().balanced
    busy.ledger.db.run("BEGIN")
    assert busy.ledger.db.run(harm) >= 1
    busy.ledger.db.commit()
    report = busy.audit()
    assert not report.balanced
    wrong = report.to_dict()
    assert wrong["balanced"] is False
    assert any(not identity["ok"] for identity in wrong["identities"])
    busy.check = lambda: None  # the fixture need not look again


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

"""The audit: balanced for every honest ledger (see the other tests), not balanced for a tampered one."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dataflow_world import World, policies, prompts
from rillflow.dataflow.audit import AuditReport, audit
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import Replay
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.ledger.states import MACHINES
from rillflow.errors import CorruptData, RunError, StorageError


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a ledger that balances: two policies, a replayer and a stage; something of every kind."""
    rules = policies(main={"staleness": 1, "stages": ("score",)}, other={"staleness": 2})
    hooks = Hooks(filters=[("zero_variance", ZeroVariance())], sampler=Replay(ratio=0.5, pool=9, staleness=3))
    world = World(tmp_path_factory.mktemp("busy"), policies=rules, hooks=hooks, heldout=prompts(2, "h"))

    def play():
        world.play_all()
        world.attempts += 1
        if (batch := world.ask_stage("score", f"w{world.attempts}")) is not None:
            world.commit_stage(batch, "score")

    for _ in range(2):
        play()
        world.commit(world.batch())
        world.commit(world.batch(policy="other"))
    world.join(1)
    for policy in ("main", "other", "other"):
        play()
        world.commit(world.batch(policy=policy))
    play()
    world.batch()
    world.commit(world.batch(policy="other"))
    for lease in world.lease(1):
        world.fail(lease)
    for lease in world.lease(2):
        world.done(lease)
    assert world.ask_stage("score", "y") is not None
    world.batch(policy="other")
    world.commit(world.batch(policy="other"))
    world.batch(policy="other")
    assert world.lease(1)
    world.lose(world.row_of("t000000.0-1"))
    world.clock.time += 1000
    world.unit()
    world.check()
    world.close()
    return world.path


TABLES = {"attempts": "ended_attempts"}  # where it is not the table of the same name
HARMS = [
    "DELETE FROM samples WHERE grp = 't000000' AND place = 0 AND n = 0",
    "DELETE FROM groups WHERE id = 't000001'",
    "DELETE FROM tasks WHERE id = 't000001.0'",
    "DELETE FROM ended_attempts",
    "UPDATE groups SET state = 'open' WHERE id = 't000000'",
    "UPDATE groups SET scoring = 1 WHERE id = 't000000'",
    "UPDATE groups SET state = 'nowhere' WHERE id = 't000000'",
    "UPDATE groups SET state = 'failed' WHERE state = 'trained'",
    "UPDATE tasks SET state = 'pending' WHERE id = 't000000.0'",
    "UPDATE tasks SET samples = 3 WHERE id = 't000000.0'",
    "UPDATE samples SET place = 7 WHERE grp = 't000000' AND place = 0",
    "UPDATE samples SET oldest = -5 WHERE grp = 't000000' AND place = 0",
    "UPDATE samples SET oldest = -5",
    "UPDATE batches SET state = 'committed' WHERE state = 'rolled_back'",
    "UPDATE batches SET complete = 0",
    "UPDATE batches SET samples = 9 WHERE state = 'committed'",
    "INSERT INTO members SELECT b.id, 99, m.grp, m.producer, 0, 0, 0 FROM batches b JOIN members m WHERE b.state = "
    "'leased' AND m.n = 0 LIMIT 1",
    "UPDATE members SET replayed = 1",
    "UPDATE members SET grp = 't000000'",
    "UPDATE steps SET state = 'live'",
    "UPDATE policies SET version = 2",
    "UPDATE policies SET version = 9",
    "UPDATE policies SET steps = steps + 1",
    "UPDATE counters SET value = value + 1 WHERE name = 'admitted.train'",
    "UPDATE tally SET n = n + 1 WHERE state = 'trained'",
    "UPDATE share_tally SET n = n + 1 WHERE state = 'trained'",
    "UPDATE groups SET state = 'evaluated' WHERE id = 't000000'",
    "UPDATE groups SET state = 'trained' WHERE lane = 'eval'",
    "UPDATE groups SET state = 'nowhere' WHERE lane = 'eval'",
    "DELETE FROM groups WHERE lane = 'eval'",
    "UPDATE tasks SET state = 'cancelled' WHERE state IN ('pending', 'leased')",
    "UPDATE tasks SET failures = 1 WHERE id = 't000000.0'",
    "UPDATE tasks SET attempt = 'nothing' WHERE id = 't000000.0'",
    "UPDATE tasks SET digest = NULL WHERE id = 't000000.0'",
    "UPDATE nodes SET held = held + 1",
    "INSERT INTO counters VALUES ('segments_reclaimed', 1)",
    "INSERT INTO orphans VALUES ('main', -1, 0)",
    "INSERT INTO orphans VALUES ('other', -1, 0)",
    "UPDATE shares SET state = 'expired' WHERE state = 'trained' AND grp = 't000000'",
    "UPDATE shares SET state = 'nowhere'",
    "UPDATE shares SET samples = 7 WHERE state = 'trained'",
    "UPDATE shares SET todo = 1 WHERE state = 'leased'",
    "UPDATE shares SET held = 0",
    "UPDATE shares SET grp = 'e0.000000' WHERE grp = 't000000'",
    "DELETE FROM stage_batches WHERE state = 'leased'",
    "UPDATE samples SET live = 0 WHERE grp = 't000000'",
    "UPDATE segments SET live = live + 1",
    "UPDATE segments SET state = 'dropping'",
    "DELETE FROM quarantine",
    "UPDATE ended_attempts SET state = 'failed', cause = ''",
    "; ".join(f"UPDATE {TABLES.get(name, name)} SET state = 'nowhere'" for name in MACHINES),
]


def harmed(ledger: Path, copy: Path, harm: str) -> AuditReport:
    """Return the audit of a copy of the ledger after the harm."""
    shutil.copy(ledger, copy)
    with closing(sqlite3.connect(copy)) as db:
        assert all([db.execute(statement).rowcount >= 1 for statement in harm.split(";")])
        db.commit()
    return audit(copy)


@pytest.mark.parametrize("harm", HARMS)
def test_harm_is_noticed(busy: Path, tmp_path: Path, harm: str) -> None:
    report = harmed(busy, tmp_path / "copy.sqlite", harm)
    assert not report.balanced
    wrong = report.as_json()
    assert wrong["balanced"] is False
    assert any(not identity["ok"] for identity in wrong["identities"])


def test_every_identity_can_fail(busy: Path, tmp_path: Path) -> None:
    """An identity that no harm breaks proves nothing."""
    names, broken = set(), set()
    for number, harm in enumerate(HARMS):
        report = harmed(busy, tmp_path / f"copy{number}.sqlite", harm)
        names |= {identity.name for identity in report.identities}
        broken |= {identity.name for identity in report.identities if not identity.ok}
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


def test_a_ledger_of_another_format_is_named(make_world):
    world = make_world()
    world.ledger.db.set_meta("format", 1)
    world.ledger.commit()
    with pytest.raises(CorruptData, match=f"has ledger format 1, this version reads {FORMAT}"):
        audit(world.path)
    world.ledger.db.set_meta("format", FORMAT)

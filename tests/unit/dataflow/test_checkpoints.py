"""The log is copied into the database's file beside the event loop, and stays bounded."""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
from dataflow_server import served

from rillflow.dataflow.audit import audit
from rillflow.dataflow.ledger.database import Database
from rillflow.errors import StorageError

EVERY = 100


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr("rillflow.dataflow.group_commit.COPY_EVERY", EVERY)


async def change(run, times=1):
    """Change some rows, each time in a commit of its own."""

    def add():
        with run.ledger.db.change():
            run.ledger.db.many("INSERT INTO events (line) VALUES (?)", [("{}" + " " * 2000,)] * 10)

    for _ in range(times):
        await run.service._do(add)
        await run.client.unit_beat(run.beat())


async def test_no_commit_copies_the_log(tmp_path, monkeypatch):
    async with served(tmp_path) as run:
        threads, checkpoint = set(), run.ledger.db.checkpoint

        def noted():
            threads.add(threading.current_thread().name.rpartition("_")[0])
            return checkpoint()

        monkeypatch.setattr(run.ledger.db, "checkpoint", noted)
        assert run.ledger.db.value("PRAGMA wal_autocheckpoint") == 0
        await change(run, 50)
        assert threads == {"ledger-checkpoint"}


async def test_the_log_stays_bounded(tmp_path):
    """Under continuous calls each checkpoint resets the log."""
    log = tmp_path / "ledger.sqlite-wal"
    async with served(tmp_path) as run:
        await change(run, 3 * EVERY // 10)
        first = log.stat().st_size
        await change(run, 30 * EVERY // 10)
        assert log.stat().st_size < 3 * first
    assert audit(tmp_path / "ledger.sqlite").balanced


async def test_calls_are_answered_while_the_log_is_copied(tmp_path, monkeypatch):
    async with served(tmp_path) as run:
        began, go_on, checkpoint = threading.Event(), threading.Event(), run.ledger.db.checkpoint

        def slow():
            began.set()
            assert go_on.wait(60)
            return checkpoint()

        monkeypatch.setattr(run.ledger.db, "checkpoint", slow)
        await change(run, EVERY // 10 + 2)
        assert began.wait(60)
        assert not go_on.is_set()
        await asyncio.wait_for(change(run, 3), 60)
        assert (await run.client.status()).phase == "training"
        go_on.set()
        await asyncio.wait_for(change(run, 3 * EVERY // 10), 60)


async def test_changes_wait_for_the_rest_and_looks_do_not(tmp_path, monkeypatch):
    async with served(tmp_path) as run:
        calls, held, go_on, checkpoint = [], threading.Event(), threading.Event(), run.ledger.db.checkpoint

        def second_is_slow():
            calls.append(1)
            if len(calls) == 2:
                held.set()
                assert go_on.wait(60)
            return checkpoint()

        monkeypatch.setattr(run.ledger.db, "checkpoint", second_is_slow)
        changing = asyncio.create_task(change(run, 3 * EVERY // 10))
        assert await asyncio.to_thread(held.wait, 60)
        changed = run.ledger.db.changes
        for _ in range(50):
            assert (await asyncio.wait_for(run.client.status(), 60)).phase == "training"
        assert run.ledger.db.changes == changed
        assert not changing.done()
        go_on.set()
        await asyncio.wait_for(changing, 60)


async def test_a_copy_that_fails_is_tried_again(tmp_path, monkeypatch, caplog):
    async with served(tmp_path) as run:
        failed, checkpoint = [], run.ledger.db.checkpoint

        def faulty():
            if len(failed) < 2:
                failed.append(1)
                raise StorageError("disk I/O error")
            return checkpoint()

        monkeypatch.setattr(run.ledger.db, "checkpoint", faulty)
        await change(run, 10 * EVERY // 10)
        assert len(failed) == 2
        assert "could not be copied" in caplog.text


def test_a_reserved_log_does_not_grow_and_is_read_after_a_kill(tmp_path):
    db = Database(tmp_path / "ledger.sqlite")
    db.reserve_log(1 << 20)
    log = tmp_path / "ledger.sqlite-wal"
    before = log.stat().st_size
    for number in range(20):
        with db.change():
            db.set_meta("number", number)
        db.commit()
    assert (before, log.stat().st_size) == (1 << 20, 1 << 20)
    left = tmp_path / "left"  # as a killed process leaves them
    left.mkdir()
    for file in (db.path, log):
        shutil.copy(file, left)
    db.close()
    again = Database(left / "ledger.sqlite")
    assert again.meta("number") == 19
    again.reserve_log(1 << 20)
    assert (left / log.name).stat().st_size == 1 << 20, "what is reserved stays"
    again.close()


def test_no_log_is_reserved_on_a_disk_that_is_nearly_full(tmp_path):
    db = Database(tmp_path / "ledger.sqlite")
    log = tmp_path / "ledger.sqlite-wal"
    before = log.stat().st_size
    db.reserve_log(1 << 60)
    assert log.stat().st_size == before
    db.close()

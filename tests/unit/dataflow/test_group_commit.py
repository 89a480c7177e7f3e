"""Waiting for the disk: whatever fails beside a commit, every waiting call gets an answer."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from contextlib import suppress

import pytest
from dataflow_server import served

from dataflow_world import POLICY, RULES, FakeClock, prompts
from rillflow.clients.dataflow import DataflowClient
from rillflow.dataflow.group_commit import GroupCommit, Journal
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.service import DataflowService
from rillflow.errors import RillflowError, StorageError, Unavailable
from rillflow.types import LeaseTasks, UnitBeat, UnitInfo
from rillflow.wire import Client
from rillflow.wire.blocking import News


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", RULES, prompts(5))
    yield ledger
    ledger.db.close()


async def until(condition):
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


async def soon(waiting):
    return await asyncio.wait_for(waiting, 60)


async def test_a_journal_that_fails_keeps_nobody_waiting(ledger):
    def broken(until):
        raise ValueError("the copy is damaged")

    disk = GroupCommit(ledger, 0.001, broken)
    for _ in range(2):
        ledger.advance()
        ledger.db.count("anything")
        await soon(disk.durable())
        assert not ledger.dirty


async def test_a_commit_that_fails_in_an_unknown_way_is_told_to_all(ledger, monkeypatch):
    def broken():
        raise RuntimeError("never seen before")

    disk = GroupCommit(ledger, 0.001, lambda until: None)
    ledger.db.count("anything")
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "write", broken)
        results = await soon(asyncio.gather(disk.durable(), disk.durable(), return_exceptions=True))
    assert [type(result) for result in results] == [StorageError, StorageError]
    await soon(disk.durable())
    assert not ledger.dirty


class Disk:
    """Stands before the real sync: each one waits until it is let through, or fails."""

    def __init__(self, ledger, monkeypatch):
        self.begun = 0
        self.error = None
        self._through = threading.Semaphore(0)
        self._real = ledger.sync
        monkeypatch.setattr(ledger, "sync", self._sync)

    def let_through(self, count=1):
        self._through.release(count)

    def _sync(self):
        self.begun += 1
        assert self._through.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        self._real()


async def test_nobody_is_answered_before_the_sync_that_contains_the_change(ledger, monkeypatch):
    slow = Disk(ledger, monkeypatch)
    events_told = []
    disk = GroupCommit(ledger, 0.0, events_told.append)
    ledger.db.count("first")
    first = asyncio.create_task(disk.durable())
    await until(lambda: slow.begun)
    ledger.db.event({"event": "second"})  # transitions go on while the disk works
    second = asyncio.create_task(disk.durable())
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in (first, second))
    slow.let_through()
    await soon(first)
    await until(lambda: not ledger.dirty and slow.begun == 2)
    idle = asyncio.create_task(disk.durable())  # changes nothing, but must not tell of what may yet be lost
    await asyncio.sleep(0.02)
    assert (second.done(), idle.done(), slow.begun) == (False, False, 2)
    assert events_told == [0]
    slow.let_through()
    await soon(asyncio.gather(second, idle))
    assert events_told == [0, 1]
    await disk.close()


async def test_what_is_changed_during_a_sync_is_one_write(ledger, monkeypatch):
    slow = Disk(ledger, monkeypatch)
    writes = []
    real = ledger.write
    monkeypatch.setattr(ledger, "write", lambda: (writes.append(1), real()))
    disk = GroupCommit(ledger, 0.0, lambda until: None)
    ledger.db.count("first")
    waiting = [asyncio.create_task(disk.durable())]
    await until(lambda: slow.begun)
    for _ in range(5):
        ledger.db.count("later")
        waiting.append(asyncio.create_task(disk.durable()))
        await asyncio.sleep(0.002)
    assert len(writes) == 1
    slow.let_through(2)
    await soon(asyncio.gather(*waiting))
    assert (len(writes), slow.begun) == (2, 2)
    await disk.close()


async def test_a_caller_that_goes_away_takes_no_write_with_it(ledger):
    disk = GroupCommit(ledger, 0.0, lambda until: None)
    ledger.db.count("anything")
    gone = asyncio.create_task(disk.durable())
    await asyncio.sleep(0)
    gone.cancel()
    await until(lambda: not ledger.dirty)
    await disk.close()
    with pytest.raises(Unavailable):
        await disk.durable()


async def test_a_sync_that_fails_is_the_end_of_all_acknowledgements(ledger, monkeypatch):
    slow = Disk(ledger, monkeypatch)
    slow.error = OSError("input/output error")
    ends = []
    disk = GroupCommit(ledger, 0.0, lambda until: None, ends.append)
    ledger.db.count("first")
    first = asyncio.create_task(disk.durable())
    await until(lambda: slow.begun)
    ledger.db.count("second")
    second = asyncio.create_task(disk.durable())
    await asyncio.sleep(0.01)
    slow.let_through()
    for waiting in (first, second):
        with pytest.raises(StorageError, match="not synced"):
            await soon(waiting)
    assert len(ends) == 1
    ledger.db.count("third")
    with pytest.raises(StorageError, match="not synced"):
        await soon(disk.durable())
    await disk.close()


async def test_a_write_that_was_taken_back_leaves_no_change_behind_that_nobody_syncs(ledger, monkeypatch):
    syncs = []
    real = ledger.sync
    monkeypatch.setattr(ledger, "sync", lambda: (syncs.append(1), real()))
    disk = GroupCommit(ledger, 0.02, lambda until: None)
    ledger.db.count("first")
    first = asyncio.create_task(disk.durable())
    await asyncio.sleep(0)
    with suppress(StorageError), ledger.db.change():
        ledger.db.run("INSERT INTO nonsense VALUES (1)")
    with pytest.raises(StorageError):
        await soon(first)
    with ledger.db.change():
        ledger.db.count("second")  # of a call that is not answered yet
    await asyncio.sleep(0.05)
    await soon(disk.durable())
    assert syncs == [1]
    await disk.close()


async def test_a_write_after_which_nothing_could_be_read_is_not_taken_for_synced(ledger, monkeypatch):
    syncs = []
    real = ledger.sync
    monkeypatch.setattr(ledger, "sync", lambda: (syncs.append(1), real()))

    def unreadable(self):
        raise RuntimeError("never seen before")

    disk = GroupCommit(ledger, 0.0, lambda until: None)
    with ledger.db.change():
        ledger.db.count("first")
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "last_event", property(unreadable))
        with pytest.raises(StorageError):
            await soon(disk.durable())
    await soon(disk.durable())
    assert syncs == [1]
    await disk.close()


def test_only_the_last_change_of_a_transaction_is_taken_back(ledger):
    def refuse():
        with ledger.db.change():
            ledger.db.count("refused")
            raise ValueError("refused")

    for first in (True, False):
        with pytest.raises(ValueError, match="refused"):
            refuse()
        assert ledger.db.counter("refused") == 0
        assert ledger.dirty is not first
        with ledger.db.change():
            ledger.db.count("kept")
    ledger.commit()
    assert ledger.db.counter("kept") == 2


async def test_what_was_changed_when_the_service_stops_is_durable_and_told(tmp_path, caplog):
    async with served(tmp_path) as run:
        await asyncio.sleep(0.01)
        with run.ledger.db.change():
            run.ledger.db.event({"event": "last"})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "last"
    await asyncio.sleep(0.02)  # nothing is left that would touch the closed ledger
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_a_service_that_broke_before_it_served_says_so(ledger, tmp_path, monkeypatch):
    service = DataflowService(ledger, Journal(tmp_path / "metrics.jsonl"), "secret")
    url = await service.start()

    def fail():
        raise OSError("input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "sync", fail)
        client = DataflowClient(Client(url, "secret", peer="dataflow"))
        with pytest.raises(StorageError, match="not synced"):
            await client.unit_beat(UnitBeat(info=UnitInfo(unit="u", path="")))
        await client.close()
    with pytest.raises(StorageError, match="not synced"):
        await soon(service.serve())
    await service.stop()


class Forgetful:
    """A curator that cannot take its state back."""

    def admit(self, prompt):
        return True

    def observe(self, group):
        pass

    def on_version(self, version):
        pass

    def state(self):
        return {}

    def restore(self, state):
        raise KeyError("state")


async def test_a_curator_that_cannot_be_restored_keeps_nobody_waiting(tmp_path):
    curator = Forgetful()
    curator.restore = lambda state: None
    ledger = Ledger(tmp_path / "ledger.sqlite", RULES, prompts(5), hooks=Hooks(curators=[("forgetful", curator)]))
    del curator.restore
    disk = GroupCommit(ledger, 0.05, lambda until: None)
    ledger.db.count("anything")
    waiting = asyncio.create_task(disk.durable())
    await asyncio.sleep(0)
    with suppress(RillflowError, KeyError), ledger.db.change():
        ledger.db.run("INSERT INTO nonsense VALUES (1)")  # the whole open transaction is taken back
    with pytest.raises(StorageError):
        await soon(waiting)
    ledger.db.close()


# ---------------------------------------------------------------- metrics.jsonl


def events(ledger, count):
    with ledger.db.change():
        for number in range(count):
            ledger.db.event({"number": number})
    ledger.commit()


def test_the_journal_survives_a_full_disk_and_goes_on_where_it_was(ledger, tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    events(ledger, 2)
    journal.catch_up(ledger)
    before = path.read_bytes()
    events(ledger, 2)

    class Full:
        """Half of the lines fit; nothing more does, not even a copy of what was there."""

        def __init__(self, *_):
            self.file = path.open("ab", buffering=0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, text):
            self.file.write(text.encode()[: len(text) - 5])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", Full)
        patched.setattr(type(path), "write_bytes", full)
        journal.catch_up(ledger)
    assert path.read_bytes().startswith(before)
    journal.catch_up(ledger)
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_metric_named_seq_does_not_confuse_the_journal(ledger, tmp_path):
    path = tmp_path / "metrics.jsonl"
    for number in (1, 2):
        with ledger.db.change():
            ledger.db.event({"seq": 0.5, "number": number})
        ledger.commit()
        Journal(path).catch_up(ledger)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"seq": 1, "number": 1},
        {"seq": 2, "number": 2},
    ]


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"[]\n", b'{"seq"\n', b'{"seq": "x"}\n'])
def test_lines_that_a_power_failure_damaged_are_written_again(ledger, tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    events(ledger, 3)
    Journal(path).catch_up(ledger)
    whole = path.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    path.write_bytes(first + damage)
    Journal(path).catch_up(ledger)
    assert path.read_bytes() == whole


# ---------------------------------------------------------------- the clock


@pytest.fixture(autouse=True)
def _quick_housekeeping(monkeypatch):
    monkeypatch.setattr("rillflow.dataflow.service.HOUSEKEEPING", 0.01)


class Jumping(FakeClock):
    """A wall clock that the test sets."""

    by = 0.0

    def now(self):
        return super().now() + self.by


async def test_a_wall_clock_that_jumps_ahead_takes_no_lease_away(tmp_path):
    clock = Jumping()
    async with served(tmp_path, clock=clock) as run:
        await run.join()
        leases = (await run.lease()).leases
        await run.done(leases[0])
        clock.by = 7200.0
        await run.pass_time(clock, 2)
        assert (await run.client.status()).nodes == 1
        assert [await run.done(lease) for lease in leases[1:]] == [True, True, True]
        batch = (await run.ask("a")).batch
        clock.by = 14400.0
        await run.pass_time(clock, 2)
        assert await run.commit(batch, 1)


async def test_a_wall_clock_that_is_set_back_keeps_no_lease_for_ever(tmp_path):
    clock = Jumping()
    async with served(tmp_path, clock=clock, task_lease=3.0, node_timeout=3.0) as run:
        first = (await run.lease()).leases  # to a node that dies
        clock.by = -7200.0
        ask = LeaseTasks(node="n1", incarnation="a", want=100, versions={POLICY: 0}, wait=20)
        asked = asyncio.create_task(run.client.lease_tasks(ask))
        await run.waits_for(lambda waits: any("node n1 waits for" in wait for wait in waits))
        await run.pass_time(clock, 5)
        again = (await soon(asked)).leases
        assert {lease.task.id for lease in again} == {lease.task.id for lease in first}


def test_a_wall_clock_that_was_set_back_while_the_service_was_down_keeps_no_lease_for_ever(make_world):
    world = make_world()
    lease, *_ = world.lease()
    world.ledger.commit()
    world.clock.time -= 7200.0
    world.crash()
    world.clock.time += world.rules.task_lease + 1
    world.beat()  # the node lives, but the answer with its leases never reached it
    world.ledger.expire()
    assert world.task(lease.task.id) == "pending"


def test_a_task_that_went_wrong_is_not_left_to_others_for_as_long_as_the_clock_was_set_back(make_world):
    world = make_world()
    world.beat(node="n1")
    lease, *_ = world.lease(1)
    world.fail(lease)
    world.clock.time -= 7200.0
    world.ledger.grace()
    world.clock.time += world.rules.node_timeout - 1
    world.beat(node="n1")
    assert lease.task.id not in {other.task.id for other in world.lease(1)}
    world.clock.time += 2
    assert lease.task.id in {other.task.id for other in world.lease(1)}


# ---------------------------------------------------------------- news


async def test_news_wake_all_who_wait():
    news = News(0.0)
    waiting = [asyncio.create_task(news.wait(60)) for _ in range(3)]
    await asyncio.sleep(0)
    assert news.waiting == 3
    news.tell()
    await soon(asyncio.gather(*waiting))
    assert news.waiting == 0
    await soon(news.wait(0.01))  # no report came in time

"""A request's fault is its own: it is refused, and what shares its transaction is not."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import Iterator

import msgspec
import pytest
from dataflow_server import served

from dataflow_world import POLICY, UNIT, FakeClock
from rillflow.dataflow.service import DataflowService
from rillflow.errors import BadRequest, DiskFull
from rillflow.types import Ack, FailTask, Heartbeat, RetireNode, UnitBeat, UnitInfo

# Bodies whose numbers the ledger checks one by one, so that one of them does not refuse those that travel with it.
CHECKED_BY_THE_LEDGER = {"/tasks/complete"}


def unbounded_floats(kind: msgspec.inspect.Type, at: str) -> Iterator[str]:
    """Yield the path of each float in a type that may be NaN or infinite."""
    match kind:
        case msgspec.inspect.FloatType(ge=None) | msgspec.inspect.FloatType(le=None):
            yield at
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                yield from unbounded_floats(field.type, f"{at}.{field.name}")
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.DictType(value_type=item):
            yield from unbounded_floats(item, f"{at}[]")
        case msgspec.inspect.UnionType(types=types):
            for one in types:
                yield from unbounded_floats(one, at)


async def test_every_number_of_every_body_is_finite(tmp_path):
    async with served(tmp_path) as run:
        service: DataflowService = run.service
        found = [
            where
            for route in service.routes()
            if route.has_body and route.path not in CHECKED_BY_THE_LEDGER
            for where in unbounded_floats(msgspec.inspect.type_info(route.body), f"{route.path} {route.body.__name__}")
        ]
        assert found == [], "give these fields the type `Finite`"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
async def test_numbers_that_are_not_finite_are_refused_on_the_wire(tmp_path, bad):
    async with served(tmp_path) as run:
        await run.join()
        await run.play_all()
        batch = (await run.ask("a")).batch
        with pytest.raises(BadRequest):
            await run.commit(batch, 1, metrics={"loss": bad})
        beat = Heartbeat(node="n0", incarnation="a", attempts=[], versions={POLICY: 0}, capacity=1, stats={"x": bad})
        with pytest.raises(BadRequest):
            await run.client.heartbeat(beat)
        with pytest.raises(BadRequest):
            await run.client.retire(RetireNode(node="n0", drain=bad))
        with pytest.raises(BadRequest):
            await run.client.unit_beat(UnitBeat(info=UnitInfo(unit=UNIT, path="", load=bad)))
        assert await run.commit(batch, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["seconds", "metrics"])
def test_a_completion_with_a_number_that_is_not_finite_is_refused_alone(make_world, bad, what):
    world = make_world()
    news = [world.news(lease) for lease in world.lease(4)]
    news[1] = msgspec.structs.replace(news[1], **{what: bad if what == "seconds" else {"score": bad}})
    answers = world.ledger.complete_many(news)
    assert [isinstance(answer, BadRequest) for answer in answers] == [False, True, False, False]
    assert [world.task(one.task) for one in news] == ["done", "leased", "done", "done"]


def test_a_completion_that_breaks_a_constraint_is_refused_alone(make_world, monkeypatch):
    """Whatever check was forgotten: the database has the last word on one completion, not on its neighbours."""
    world = make_world()
    news = [world.news(lease) for lease in world.lease(4)]
    monkeypatch.setattr("rillflow.dataflow.ledger.attempts.Judge._why_refused", lambda self, news: None)
    news[2] = msgspec.structs.replace(news[2], samples=[msgspec.structs.replace(news[2].samples[0], reward=math.nan)])
    monkeypatch.setattr("rillflow.dataflow.ledger.attempts._why_failed", lambda lane, news: "")
    answers = world.ledger.complete_many(news)
    assert [isinstance(answer, BadRequest) for answer in answers] == [False, False, True, False]
    assert [world.task(one.task) for one in news] == ["done", "done", "leased", "done"]


async def test_a_broken_constraint_leaves_the_rest_of_the_group_commit(tmp_path, monkeypatch):
    async with served(tmp_path) as run:
        leases = (await run.lease(4)).leases
        db, fail = run.ledger.db, run.ledger.tasks.fail

        def break_one(news: FailTask) -> tuple[Ack, list[str]]:
            ack = fail(news)
            if news.attempt == leases[1].attempt:
                db.run("INSERT INTO counters VALUES ('half done', NULL)")
            return ack

        monkeypatch.setattr(run.ledger.tasks, "fail", break_one)
        news = [
            FailTask(task=lease.task.id, attempt=lease.attempt, node="n0", cause="crash", error="") for lease in leases
        ]
        answers = await asyncio.gather(*(run.client.fail(one) for one in news), return_exceptions=True)
        assert [type(answer) for answer in answers] == [Ack, BadRequest, Ack, Ack]
        failures = [db.value("SELECT failures FROM tasks WHERE id = ?", (one.task,)) for one in news]
        assert failures == [1, 0, 1, 1]
    with sqlite3.connect(tmp_path / "ledger.sqlite") as disk:
        assert disk.execute("SELECT sum(failures) FROM tasks").fetchone() == (3,)


async def test_a_disk_that_fails_once_is_asked_again(tmp_path, monkeypatch):
    async with served(tmp_path) as run:
        (lease, *_) = (await run.lease(1)).leases
        db, run_statement, faults = run.ledger.db, run.ledger.db.run, [sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_BUSY]

        def faulty(statement, values=()):
            if faults and statement == "COMMIT":
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = faults.pop(0)
                raise error
            return run_statement(statement, values)

        monkeypatch.setattr(db, "run", faulty)
        assert await run.done(lease)
        assert not faults
        assert db.value("SELECT state FROM tasks WHERE id = ?", (lease.task.id,)) == "done"


async def test_leases_outlive_a_time_in_which_the_disk_took_nothing(tmp_path, monkeypatch):
    """They could not be renewed: their nodes get a full lease again, and report finished episodes."""
    monkeypatch.setattr("rillflow.dataflow.service.HOUSEKEEPING", 0.01)
    clock = FakeClock()
    async with served(tmp_path, clock=clock, task_lease=30.0, node_timeout=1e9) as run:
        (lease, *_) = (await run.lease(1)).leases
        expire, failed = run.ledger.expire, asyncio.Event()

        def full() -> None:
            failed.set()
            raise DiskFull("no space left")

        monkeypatch.setattr(run.ledger, "expire", full)
        await asyncio.wait_for(failed.wait(), 60)
        clock.time += 60.0
        failed.clear()
        await asyncio.wait_for(failed.wait(), 60)
        monkeypatch.setattr(run.ledger, "expire", expire)
        await run.housekeeping()
        assert await run.done(lease)


def test_a_value_that_sqlite_cannot_hold_is_refused(make_world):
    world = make_world()
    with pytest.raises(BadRequest), world.ledger.db.change():
        world.ledger.db.run("INSERT INTO counters VALUES (?, ?)", ("x", object()))
    assert world.lease(1)

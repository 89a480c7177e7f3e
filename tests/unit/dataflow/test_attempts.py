"""Every call that changes something can be made twice: it has an attempt id, or the second time changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from dataflow_server import served
from dataflow_world import POLICY

from rillflow.dataflow.units import FileUnit
from rillflow.dataflow.units.service import UnitService
from rillflow.engine.service import EngineService
from rillflow.errors import BadRequest
from rillflow.types import LeaseTasks
from rillflow.wire import Service

# Bodies without an attempt id, and why a second copy does no harm.
WITHOUT = {
    "/nodes/heartbeat": "sets what the node says of itself, and names the attempts that it renews",
    "/nodes/retire": "the earlier end counts",
    "/nodes/leave": "names the incarnation, which leaves once",
    "/trainers/join": "names the incarnation, whose first answer is repeated",
    "/units/beat": "sets what the unit says of itself; a segment is dropped once",
    "/rows/lost": "a row is lost once",
    "/stop": "a run that has ended stays as it is",
    "/engines/beat": "sets what the engine says of itself",
    "/engines": "only reads",
    "/weights/turn": "an engine that has a turn keeps it",
    "/weights/fetch": "sets what the engine downloads",
    "/put": "rows that nobody reports are reclaimed",
    "/get": "only reads",
    "/pause": "a hold is known by its reason",
    "/resume": "a hold is known by its reason",
}


def has_attempt(body: msgspec.inspect.Type) -> bool:
    """Whether a body, or each item of a list in it, has an attempt id."""
    if not isinstance(body, msgspec.inspect.StructType):
        return False
    lists = [field.type.item_type for field in body.fields if isinstance(field.type, msgspec.inspect.ListType)]
    return any(field.name == "attempt" for field in body.fields) or any(map(has_attempt, lists))


@pytest.fixture
def services(tmp_path) -> Iterator[list[Service]]:
    unit, nothing = FileUnit(tmp_path / "unit"), _Nothing()
    yield [UnitService(unit, "token", nothing), EngineService(nothing, "token")]
    unit.close()


class _Nothing:
    """Stands for whatever a service is made of and does not use before it is started."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def __call__(self, *_: object) -> None: ...


async def test_every_call_that_changes_something_has_an_attempt_id(tmp_path, services):
    async with served(tmp_path) as run:
        bodies = {path: body for service in (run.service, *services) for path, body in service.bodies.items()}
    lacking = {path for path, body in bodies.items() if not has_attempt(msgspec.inspect.type_info(body))}
    assert lacking - set(WITHOUT) == set(), "give the body an `attempt`, or say in WITHOUT why it needs none"
    assert set(WITHOUT) - lacking == set(), "these routes have an attempt id, or are gone"


async def test_a_lease_that_is_asked_for_again_is_the_same(tmp_path):
    """As when the answer was lost: the client sends the same body again."""
    async with served(tmp_path) as run:
        ask = LeaseTasks(node="n0", incarnation="a", want=2, versions={POLICY: 0})
        first, again = await run.client.lease_tasks(ask), await run.client.lease_tasks(ask)
        assert len(first.leases) == 2
        assert again == first
        assert run.ledger.nodes.held("n0") == (2, 0)
        other = await run.client.lease_tasks(LeaseTasks(node="n0", incarnation="a", want=2, versions={POLICY: 0}))
        assert not {lease.attempt for lease in other.leases} & {lease.attempt for lease in first.leases}


def test_a_lease_is_repeated_after_the_service_was_killed(make_world):
    world = make_world()
    first = world.lease(2, ask="q")
    world.ledger.commit()
    world.crash()
    assert world.lease(2, ask="q") == first
    assert world.ledger.nodes.held("n0") == (2, 0)


def test_a_lease_that_is_repeated_has_its_full_time_again(make_world):
    world = make_world(task_lease=30.0, node_timeout=1e9)
    (lease,) = world.lease(1, ask="q")
    world.clock.time += 20
    world.lease(1, ask="q")
    world.clock.time += 20
    world.ledger.expire()
    assert world.task(lease.task.id) == "leased"


def test_what_is_no_longer_held_is_not_repeated(make_world):
    world = make_world()
    one, two = world.lease(2, ask="q")
    world.done(one)
    assert world.lease(2, ask="q") == [two]
    world.done(two)
    assert not {lease.attempt for lease in world.lease(2, ask="q")} & {one.attempt, two.attempt}


def test_another_nodes_attempt_id_is_not_repeated(make_world):
    world = make_world()
    mine = world.lease(1, ask="q", node="n0")
    theirs = world.lease(1, ask="q", node="n1")
    assert mine[0].task.id != theirs[0].task.id


@pytest.mark.parametrize("attempt", ["", "x" * 201])
def test_an_attempt_id_is_short(make_world, attempt):
    world = make_world()
    with pytest.raises(BadRequest):
        world.lease(1, ask=attempt)

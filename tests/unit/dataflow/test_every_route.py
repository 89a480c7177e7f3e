"""Properties of every route of every service, taken from their route tables: a new route is covered automatically."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from dataflow_server import TOKEN, Served, served
from every_service import STAGE, WAIT, Started, every_service, example, path_of

import rillflow
from dataflow_world import POLICY, UNIT, FakeClock
from rillflow.config import load_recipe
from rillflow.dashboard.server import DashboardRoutes
from rillflow.engine.remote import EngineRoutes
from rillflow.evaluate.endpoint import Forwarder, Upstream
from rillflow.gateway.control import ControlRoutes
from rillflow.gateway.dialects import AgentRoutes, in_session
from rillflow.gateway.rollout_manager import EngineControlRoutes
from rillflow.types import CommitStage, LeaseStage, Row, SampleColumns
from rillflow.types.routes import MSGPACK, Dataflow, Route, StorageUnits, Updates, routes_of
from rillflow.weights.transport.serve import WeightRoutes
from rillflow.wire.routing import Common
from rillflow.wire.tokens import OPENS, SCOPES, scoped_token


@pytest.fixture
async def services(tmp_path) -> AsyncIterator[list[Started]]:
    async with every_service(tmp_path, TOKEN) as started:
        yield started


def every_route(services: list[Started]) -> list[tuple[Started, Route[Any, Any]]]:
    return [(one, route) for one in services for route in one.service.routes()]


async def status(
    http: aiohttp.ClientSession, one: Started, route: Route[Any, Any], token: str | None
) -> tuple[int, str]:
    """The status of an empty request, and the beginning of what it says; a stream is not read on."""
    headers = {"x-rillflow-dashboard": "1"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    async with http.request(route.method, one.url + path_of(route).partition("?")[0], headers=headers) as answer:
        refused = answer.status in (401, 403)
        return answer.status, (await answer.read()).decode("utf-8", "replace") if refused else ""


# ---------------------------------------------------------------- who may do what


async def test_no_service_is_missed(services):
    sources = Path(rillflow.__file__).parent.rglob("*.py")
    defined = {name for path in sources for name in re.findall(r"^class (\w+)\(\w*Service\):", path.read_text(), re.M)}
    assert defined >= {"DataflowService", "Gateway", "RelayService"}
    # The forwarder of `rillflow try --endpoint` serves one episode and has its own key: see below.
    assert {type(one.service).__name__ for one in services} == defined - {"Forwarder"} | {"Service"}


TABLES = {
    "dataflow": (Dataflow, Updates), "unit": (StorageUnits,), "weights": (WeightRoutes,), "relay": (WeightRoutes,),
    "engine": (EngineRoutes,), "gateway": (AgentRoutes, ControlRoutes, EngineControlRoutes), "trainer": (),
    "dashboard": (DashboardRoutes,),
}  # fmt: skip


async def test_every_service_serves_the_routes_of_its_tables_and_no_others(services):
    for one in services:
        declared = [route for table in (*TABLES[one.service.name], Common) for route in routes_of(table)]
        if one.service.name == "gateway":
            declared += [in_session(route) for route in routes_of(AgentRoutes)]
        served_routes = [(route.method, route.path, route.scopes) for route in one.service.routes()]
        assert sorted(served_routes) == sorted((route.method, route.path, route.scopes) for route in declared)


async def test_every_service_describes_its_routes_to_readers(services):
    async with aiohttp.ClientSession() as http:
        for one in services:
            headers = {"authorization": f"Bearer {scoped_token(TOKEN, 'reader')}"}
            async with http.get(f"{one.url}/openapi.json", headers=headers) as answer:
                described = await answer.json()
            found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
            assert found == {(route.method, route.path.replace(":int", "")) for route in one.service.routes()}
            references = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
            assert references == set(described["components"]["schemas"])


async def test_every_route_without_a_token_is_401(services):
    async with aiohttp.ClientSession() as http:
        for one, route in every_route(services):
            for token in (None, "", "wrong", scoped_token("another run", "operator")):
                assert (await status(http, one, route, token))[0] == 401, (one.service.name, route)


async def test_every_route_with_a_token_of_another_scope_is_403_and_says_which_it_needs(services):
    async with aiohttp.ClientSession() as http:
        for scope in SCOPES:
            for one, route in every_route(services):
                found, said = await status(http, one, route, scoped_token(TOKEN, scope))
                at = (one.service.name, route.path, scope, said)
                if scope not in one.service.keyring.digests:
                    assert found == 401, at
                elif OPENS[scope].isdisjoint(route.scopes):
                    assert found == 403, at
                    assert " or ".join(route.scopes) in said
                else:
                    assert found not in (401, 403), at


async def test_the_service_of_one_episode_opens_to_its_own_key_alone():
    async with aiohttp.ClientSession() as http:
        forwarder = Forwarder(
            load_recipe("quickstart"), Upstream("http://127.0.0.1:1/v1", "m"), http, lambda *told: None
        )
        one = Started(await forwarder.start(), forwarder)
        for route in forwarder.routes():
            for token in (None, "", "wrong", *(scoped_token(TOKEN, scope) for scope in SCOPES)):
                assert (await status(http, one, route, token))[0] == 401, route
            assert (await status(http, one, route, forwarder.key))[0] != 401, route
        await forwarder.stop()


async def test_a_reader_changes_nothing(services):
    """Whatever a reader may ask is a GET, of which none changes anything."""
    changing = [route for _, route in every_route(services) if "reader" in route.scopes and route.method != "GET"]
    assert changing == []


async def test_a_node_neither_trains_nor_operates(services):
    (dataflow,) = [one.service for one in services if one.service.name == "dataflow"]
    scopes = {route.path: route.scopes for route in dataflow.routes()}
    assert scopes["/stop"] == scopes["/nodes/retire"] == ("operator",)
    assert scopes["/units/beat"] == ("unit",)
    assert scopes["/stages/lease"] == scopes["/stages/commit"] == ("stage",)
    assert scopes["/batches/commit"] == scopes["/batches/lease"] == scopes["/trainers/join"] == ("trainer",)


# ---------------------------------------------------------------- long polls


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - a metric sends no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"waited in vain until {what}")


async def test_every_route_that_waits_ends_with_its_client(services):
    waiting = [(one, route) for one, route in every_route(services) if route.waits]
    assert {"/tasks/lease", "/sessions", "/feed", "/generate", "/weights/{policy}/line"} <= {r.path for _, r in waiting}
    for one, route in waiting:
        await assert_ends_with_its_client(one, route)


async def assert_ends_with_its_client(one: Started, route: Route[Any, Any]) -> None:
    def at_work() -> float:
        return one.service.registry.get_sample_value("rillflow_requests_open", {"route": route.path}) or 0.0

    others = at_work()  # a relay waits at the weight server
    encode = msgspec.msgpack.encode if route.content == MSGPACK else msgspec.json.encode
    body = encode(example(route.body, {"": {"wait": WAIT}})) if route.has_body else b""
    where, token = urlsplit(one.url), scoped_token(TOKEN, route.scopes[0])
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"{route.method} {path_of(route)} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: at_work() == others + 1, f"{route.path} begins")
    await asyncio.sleep(0.05)
    assert at_work() == others + 1, f"{route.path} did not wait: {(await reader.read(2000)).decode('utf-8', 'replace')}"
    writer.close()
    await until(lambda: at_work() == others, f"{route.path} ends")


# ---------------------------------------------------------------- calls that are made twice


def has_attempt(body: msgspec.inspect.Type) -> bool:
    """Return whether a body, or each item of a list in it, has an attempt id."""
    if not isinstance(body, msgspec.inspect.StructType):
        return False
    lists = [field.type.item_type for field in body.fields if isinstance(field.type, msgspec.inspect.ListType)]
    return any(field.name == "attempt" for field in body.fields) or any(map(has_attempt, lists))


async def test_every_call_that_changes_something_has_an_attempt_id_or_says_why_not(services):
    for one, route in every_route(services):
        if not route.has_body:
            assert not route.again, (one.service.name, route)
            continue
        identified = has_attempt(msgspec.inspect.type_info(route.body))
        assert identified != bool(route.again), (one.service.name, route, "give an `attempt`, or say why it needs none")


async def under_way(run: Served) -> dict[str, dict[str, Any]]:
    """A run in which everything is leased: tasks, a group of a stage, a batch. Returns the ids that each body must name
    to be about them."""
    await run.join()
    for lease in (await run.lease(4)).leases:
        await run.done(lease)
    for attempt in ("first", "second"):
        ask = LeaseStage(policy=POLICY, stage=STAGE, attempt=attempt, groups=9, wait=0)
        stage = (await run.client.lease_stage(ask)).batch
        assert stage is not None
        columns = [
            SampleColumns(sample=one.id, row=Row(unit=UNIT, segment=0, offset=0, length=8)) for one in stage.samples
        ]
        if attempt == "first":
            news = CommitStage(policy=POLICY, stage=STAGE, batch=stage.id, attempt=attempt, columns=columns)
            assert (await run.client.commit_stage(news)).accepted
            for lease in (await run.lease(2)).leases:
                await run.done(lease)
    batch = (await run.ask("a")).batch
    assert batch is not None
    played, failed = (await run.lease(2)).leases
    lost = batch.samples[0].row
    mine = {"node": "n0", "incarnation": "a"}
    return {
        "LeaseTasks": mine,
        "LeaveRun": mine,
        "Heartbeat": mine | {"attempts": [played.attempt, failed.attempt]},
        "RetireNode": {"node": "n0"},
        "CompleteTask": {"node": "n0", "task": played.task.id, "attempt": played.attempt},
        "SampleMeta": {"oldest": 0, "newest": 0},
        "FailTask": {"node": "n0", "task": failed.task.id, "attempt": failed.attempt},
        "CommitBatch": {"batch": batch.id, "attempt": batch.attempt, "version": 1},
        "RenewBatch": {"batch": batch.id, "attempt": batch.attempt},
        "CommitStage": {"batch": stage.id, "attempt": stage.attempt, "columns": msgspec.to_builtins(columns)},
        "JoinTrainer": {"incarnation": "another"},
        "LoseRows": {"rows": [msgspec.to_builtins(lost)]},
    }


async def test_every_call_that_comes_twice_is_answered_the_same_and_counts_once(services, tmp_path):
    """As when an answer was lost: the client sends the same body again."""
    (dataflow,) = [one.service for one in services if one.service.name == "dataflow"]
    paths = [route.path for route in dataflow.routes() if route.has_body]
    assert {"/tasks/lease", "/tasks/complete", "/batches/commit", "/stages/commit", "/rows/lost"} <= set(paths)
    await asyncio.gather(*(assert_counts_once(path, tmp_path / str(number)) for number, path in enumerate(paths)))


async def assert_counts_once(path: str, folder: Path) -> None:
    """In a run of its own, in which the clock stands still."""
    folder.mkdir()
    async with (
        served(folder, clock=FakeClock(), stages=(STAGE,), staleness=3) as run,
        aiohttp.ClientSession(run.url, headers={"authorization": f"Bearer {TOKEN}"}) as http,
    ):
        (body,) = [route.body for route in run.service.routes() if route.path == path and route.has_body]
        data = msgspec.msgpack.encode(example(body, await under_way(run)))

        async def send() -> tuple[int, bytes]:
            async with http.post(path, data=data) as answer:
                return answer.status, await answer.read()

        first = await send()
        assert first[0] == 200, f"{path} refused the example: {first[1]!r}; see every_service.NAMED"
        after = list(run.ledger.db._connection.iterdump())
        assert await send() == first, path
        assert list(run.ledger.db._connection.iterdump()) == after, path

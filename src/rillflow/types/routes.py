"""A route, declared once, and the routes between the processes of a run.

Server, client, OpenAPI page, docs and tests are made from the declaration. Every service has a table of routes: a class
whose attributes are `Route`s, named as in its clients. A table lives beside the types that it names, in the first
package that both the service and its callers may import. Here are those of the dataflow service, the updates of weights
and storage units; those of engines, weights, gateways and dashboards are beside their own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rillflow.types.balance import LedgerBalances
from rillflow.types.base import TokenScope
from rillflow.types.engine import AskTurn, EngineInfo, Engines, LookEngines, TurnReply
from rillflow.types.leases import (
    Ack,
    BatchReply,
    CommitBatch,
    CommitStage,
    Committed,
    CompleteTasks,
    FailTask,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    RenewBatch,
    TaskLeases,
    TasksTaken,
    TrainerJoined,
)
from rillflow.types.runs import (
    Heartbeat,
    HeartbeatReply,
    LeaveRun,
    NodeList,
    RetireNode,
    RunRecipe,
    Status,
    StopRun,
    TellFetch,
    WeightsKey,
)
from rillflow.types.units import GetRows, LoseRows, PutRows, RowsGot, RowsPut, UnitBeat, UnitBeatReply, UnitInfo, Units

Body = TypeVar("Body")
Reply = TypeVar("Reply")

MSGPACK, JSON, TEXT, BYTES = "application/msgpack", "application/json", "text/plain", "application/octet-stream"


@dataclass(frozen=True, eq=False, slots=True)
class Route(Generic[Body, Reply]):
    """One route.

    A token of one of the `scopes` opens it. `again` says why a second copy of a body does no harm; it is empty if the
    body has an attempt id, which its receiver takes once, and if the route has no body. A route that `waits` ends when
    its client disconnects. `answers` has the possible types by content type; no types mean opaque content.
    """

    method: str
    path: str
    scopes: tuple[TokenScope, ...]
    summary: str
    body: type[Body]
    reply: type[Reply]
    again: str = ""
    waits: bool = False
    content: str = MSGPACK  # of the body
    answers: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    errors: tuple[type, ...] = ()
    headers: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    optional: bool = False  # the answer may be empty (204)

    @property
    def has_body(self) -> bool:
        return self.body is not type(None)


def post(
    path: str, body: type[Body], reply: type[Reply], *scopes: TokenScope, summary: str, again: str = ""
) -> Route[Body, Reply]:
    """Declare a call with a msgpack body in both directions. It waits if its body has a field `wait`."""
    waits = "wait" in getattr(body, "__struct_fields__", ())
    return Route("POST", path, scopes, summary, body, reply, again, waits, answers=_answers(MSGPACK, reply))


def get(path: str, reply: type[Reply], *scopes: TokenScope, summary: str) -> Route[None, Reply]:
    """Declare a call that only reads, answered in msgpack."""
    return Route("GET", path, scopes, summary, type(None), reply, answers=_answers(MSGPACK, reply))


def raw(
    method: str,
    path: str,
    *scopes: TokenScope,
    summary: str,
    body: type | None = None,
    again: str = "",
    waits: bool = False,
    content: str = JSON,
    answers: Mapping[str, tuple[type, ...]],
    errors: tuple[type, ...] = (),
    headers: tuple[str, ...] = (),
    query: tuple[str, ...] = (),
    optional: bool = False,
) -> Route[Any, Any]:
    """Declare a route whose handler reads the raw request and returns a response."""
    kind: Any = type(None) if body is None else body
    return Route(
        method, path, scopes, summary, kind, object, again, waits, content, answers, errors, headers, query, optional
    )


def routes_of(table: type) -> list[Route[Any, Any]]:
    """Return the routes of a table in the order of their declaration. An attribute may be a dictionary of routes."""
    values = [value for name, value in vars(table).items() if not name.startswith("_")]
    found = [one for value in values for one in (value.values() if isinstance(value, dict) else [value])]
    return [one for one in found if isinstance(one, Route)]


def _answers(content: str, reply: Any) -> dict[str, tuple[type, ...]]:
    return {content: (reply,)}


Versions = dict[str, list[int]]  # by policy


class Dataflow:
    """The ledger: tasks for nodes, batches for trainers, status for people."""

    lease_tasks = post("/tasks/lease", LeaseTasks, TaskLeases, "node", summary="Lease tasks, or wait for some")
    complete = post("/tasks/complete", CompleteTasks, TasksTaken, "node", summary="Tell of played tasks")
    fail = post("/tasks/fail", FailTask, Ack, "node", summary="Tell that an attempt at a task failed")
    heartbeat = post(
        "/nodes/heartbeat", Heartbeat, HeartbeatReply, "node", summary="Renew a node's leases",
        again="sets what the node says of itself, and names the attempts that it renews",
    )  # fmt: skip
    leave = post(
        "/nodes/leave", LeaveRun, Ack, "node", summary="Leave the run", again="names the incarnation, which leaves once"
    )
    join = post(
        "/trainers/join", JoinTrainer, TrainerJoined, "trainer", summary="Join as the trainer of a policy",
        again="names the incarnation, whose first answer is repeated",
    )  # fmt: skip
    lease_batch = post("/batches/lease", LeaseBatch, BatchReply, "trainer", summary="Lease a batch, or wait for one")
    commit = post("/batches/commit", CommitBatch, Committed, "trainer", summary="Commit the step of a batch")
    renew_batch = post("/batches/renew", RenewBatch, Ack, "trainer", "stage", summary="Renew the lease of a batch")
    lease_stage = post("/stages/lease", LeaseStage, BatchReply, "stage", summary="Lease groups for a stage")
    commit_stage = post("/stages/commit", CommitStage, Ack, "stage", summary="Commit the columns of a stage")
    lose_rows = post(
        "/rows/lost", LoseRows, Ack, "trainer", "stage", again="a row is lost once",
        summary="Tell of rows that cannot be read as they were written",
    )  # fmt: skip
    units = get("/units", Units, "node", "trainer", "stage", summary="The storage units, the least loaded first")
    unit_beat = post(
        "/units/beat", UnitBeat, UnitBeatReply, "unit", summary="A unit tells of itself and of its segments",
        again="sets what the unit says of itself; a segment is dropped once",
    )  # fmt: skip
    retire = post("/nodes/retire", RetireNode, Ack, "operator", summary="Retire a node", again="the earlier end counts")
    stop = post("/stop", StopRun, Ack, "operator", summary="Stop the run", again="a run that has ended stays as it is")
    nodes = get("/nodes", NodeList, "reader", summary="The rollout nodes, and those that left a short while ago")
    status = get("/status", Status, "reader", summary="The run's progress, and what it waits for")
    balance = get("/balance", LedgerBalances, "reader", summary="Where time is lost, and what to change")


class Updates:
    """Turns of engines that update their weights (`weights.updates`), served beside the ledger."""

    recipe = get(
        "/recipe",
        RunRecipe,
        "node",
        "trainer",
        "stage",
        "unit",
        summary="What a process needs that joins from elsewhere",
    )
    engine_beat = post(
        "/engines/beat", EngineInfo, Engines, "node", summary="An engine tells of itself",
        again="sets what the engine says of itself",
    )  # fmt: skip
    engines = post(
        "/engines", LookEngines, Engines, "node", summary="The engine processes, or news of them", again="only reads"
    )
    turn = post(
        "/weights/turn", AskTurn, TurnReply, "node", summary="Ask for a turn to update an engine, or end it",
        again="an engine that has a turn keeps it",
    )  # fmt: skip
    fetching = post(
        "/weights/fetch", TellFetch, Ack, "node", summary="Announce the version that an engine downloads",
        again="sets what the engine downloads",
    )  # fmt: skip
    weights_key = get("/weights/key", WeightsKey, "trainer", summary="The key that signs the run's weights")
    versions_in_use = get(
        "/weights/versions", Versions, "trainer", summary="The versions that engines and nodes serve or download"
    )
    versions_wanted = get("/weights/wanted", Versions, "trainer", summary="The versions that evaluations want kept")


class StorageUnits:
    """One storage unit."""

    put = post(
        "/put",
        PutRows,
        RowsPut,
        "node",
        "stage",
        summary="Write rows",
        again="rows that nobody reports are reclaimed",
    )
    get_rows = post("/get", GetRows, RowsGot, "trainer", "stage", summary="Read columns of rows", again="only reads")
    info = get("/info", UnitInfo, "reader", summary="The unit, its load and its room")
    segment = raw(
        "GET", "/segments/{number:int}", "trainer", "stage", summary="A range of a segment's bytes",
        answers={BYTES: ()}, headers=("range",),
    )  # fmt: skip

"""The dataflow service, as nodes, trainers, supervisors and dashboards call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rillflow.clients.coalesce import Coalesced
from rillflow.errors import RillflowError, from_body
from rillflow.types import (
    Ack,
    AskTurn,
    BatchReply,
    CommitBatch,
    CommitStage,
    CompleteTask,
    CompleteTasks,
    EngineInfo,
    Engines,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    LeaveRun,
    LookEngines,
    LoseRows,
    NodeList,
    RenewBatch,
    RetireNode,
    RunRecipe,
    Status,
    StopRun,
    TaskLeases,
    TasksTaken,
    TellFetch,
    TrainerJoined,
    TurnReply,
    UnitBeat,
    UnitBeatReply,
    Units,
)
from rillflow.wire import Client
from rillflow.wire.client import DEFAULT_DEADLINE

_ANYWHERE = ("0.0.0.0", "::")  # who listens on all addresses of its host names none


def reached_by(url: str, service: str) -> str:
    """Where a process of the run listens, for who has reached its service under the URL `service`.

    One that listens on all addresses is looked for at the service's own.
    """
    parts = urlsplit(url)
    if parts.hostname not in _ANYWHERE:
        return url
    host = urlsplit(service).hostname or ""
    netloc = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{netloc}:{parts.port}" if parts.port else netloc))


class DataflowClient:
    """One method per route. A long poll's deadline is what it may wait plus what any call may take."""

    def __init__(self, client: Client) -> None:
        self.wire = client
        self._completions = Coalesced(self._complete)

    async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        return await self.wire.post("/tasks/lease", ask, TaskLeases, ask.wait + DEFAULT_DEADLINE)

    async def complete(self, news: CompleteTask, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """Completions told at the same time travel together."""
        return await self._completions(news, deadline)

    async def _complete(self, news: Sequence[CompleteTask], deadline: float) -> list[Ack | RillflowError]:
        reply = await self.wire.post("/tasks/complete", CompleteTasks(tasks=list(news)), TasksTaken, deadline)
        return [from_body(one.error) if one.error else one.ack or Ack(accepted=False) for one in reply.taken]

    async def fail(self, news: FailTask, deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.post("/tasks/fail", news, Ack, deadline)

    async def heartbeat(self, beat: Heartbeat, deadline: float = DEFAULT_DEADLINE) -> HeartbeatReply:
        return await self.wire.post("/nodes/heartbeat", beat, HeartbeatReply, deadline)

    async def retire(self, ask: RetireNode, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """Raises BadRequest when no such node is there."""
        return await self.wire.post("/nodes/retire", ask, Ack, deadline)

    async def leave(self, news: LeaveRun, deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.post("/nodes/leave", news, Ack, deadline)

    async def nodes(self, deadline: float = DEFAULT_DEADLINE) -> NodeList:
        """The rollout nodes that are there, and those that went a short while ago."""
        return await self.wire.get("/nodes", NodeList, deadline)

    async def recipe(self, deadline: float = DEFAULT_DEADLINE) -> RunRecipe:
        """What a process needs that joins from elsewhere (`clients.joining`)."""
        told = await self.wire.get("/recipe", RunRecipe, deadline)
        return msgspec.structs.replace(told, weights=reached_by(told.weights, self.wire.url) if told.weights else "")

    async def lease_batch(self, ask: LeaseBatch) -> BatchReply:
        return await self.wire.post("/batches/lease", ask, BatchReply, ask.wait + DEFAULT_DEADLINE)

    async def commit(self, news: CommitBatch, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """Raises LeaseLost when the batch is no longer this trainer's."""
        return await self.wire.post("/batches/commit", news, Ack, deadline)

    async def join(self, news: JoinTrainer, deadline: float = DEFAULT_DEADLINE) -> TrainerJoined:
        return await self.wire.post("/trainers/join", news, TrainerJoined, deadline)

    async def status(self, deadline: float = DEFAULT_DEADLINE) -> Status:
        return await self.wire.get("/status", Status, deadline)

    async def balance(self, deadline: float = DEFAULT_DEADLINE) -> dict[str, Any]:
        return await self.wire.get("/balance", dict[str, Any], deadline)

    async def stop(self, reason: str = "stopped", deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.post("/stop", StopRun(reason=reason), Ack, deadline)

    async def renew_batch(self, ask: RenewBatch, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """Raises LeaseLost when the batch is no longer held."""
        return await self.wire.post("/batches/renew", ask, Ack, deadline)

    async def lease_stage(self, ask: LeaseStage) -> BatchReply:
        return await self.wire.post("/stages/lease", ask, BatchReply, ask.wait + DEFAULT_DEADLINE)

    async def commit_stage(self, news: CommitStage, deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.post("/stages/commit", news, Ack, deadline)

    async def unit_beat(self, beat: UnitBeat, deadline: float = DEFAULT_DEADLINE) -> UnitBeatReply:
        return await self.wire.post("/units/beat", beat, UnitBeatReply, deadline)

    async def units(self, deadline: float = DEFAULT_DEADLINE) -> Units:
        """The storage units that were heard of lately, the least loaded first."""
        units = (await self.wire.get("/units", Units, deadline)).units
        return Units(units=[msgspec.structs.replace(one, url=reached_by(one.url, self.wire.url)) for one in units])

    async def engine_beat(self, info: EngineInfo, deadline: float = DEFAULT_DEADLINE) -> Engines:
        return await self.wire.post("/engines/beat", info, Engines, deadline)

    async def engines(self, ask: LookEngines, deadline: float = DEFAULT_DEADLINE) -> Engines:
        """The engine processes that were heard of lately."""
        known = await self.wire.post("/engines", ask, Engines, ask.wait + deadline)
        found = [msgspec.structs.replace(one, url=reached_by(one.url, self.wire.url)) for one in known.engines]
        return msgspec.structs.replace(known, engines=found)

    async def turn(self, ask: AskTurn, deadline: float = DEFAULT_DEADLINE) -> TurnReply:
        """Whether an engine may change its weights now, or that it has done so (`clients.turns`)."""
        return await self.wire.post("/weights/turn", ask, TurnReply, deadline)

    async def fetching(self, news: TellFetch, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """An engine tells which version it fetches (`clients.fetching`)."""
        return await self.wire.post("/weights/fetch", news, Ack, deadline)

    async def versions_in_use(self, policy: str, deadline: float = DEFAULT_DEADLINE) -> list[int]:
        """The versions of a policy that live nodes and engine processes serve, in ascending order."""
        versions = await self.wire.get("/weights/versions", dict[str, list[int]], deadline)
        return versions.get(policy, [])

    async def versions_wanted(self, policy: str, deadline: float = DEFAULT_DEADLINE) -> list[int]:
        """The versions of a policy that evaluations want kept: the best one, and those that are being evaluated."""
        versions = await self.wire.get("/weights/wanted", dict[str, list[int]], deadline)
        return versions.get(policy, [])

    async def lose_rows(self, news: LoseRows, deadline: float = DEFAULT_DEADLINE) -> Ack:
        """Rows that could not be read as they were written."""
        return await self.wire.post("/rows/lost", news, Ack, deadline)

    async def close(self) -> None:
        await self._completions.close()
        await self.wire.close()

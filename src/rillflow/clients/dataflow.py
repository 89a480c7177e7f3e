"""The dataflow service, as nodes, trainers, supervisors and dashboards call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rillflow.types import (
    Ack,
    BatchReply,
    CommitBatch,
    CompleteTask,
    FailTask,
    Heartbeat,
    HeartbeatReply,
    JoinTrainer,
    LeaseBatch,
    LeaseTasks,
    PutRows,
    Row,
    RowsPut,
    Status,
    StopRun,
    TaskLeases,
    TrainerJoined,
    UnitInfo,
)
from rillflow.wire import Client
from rillflow.wire.client import DEFAULT_DEADLINE


class DataflowClient:
    """One method per route. A long poll's deadline is what it may wait plus what any call may take."""

    def __init__(self, client: Client) -> None:
        self.wire = client

    async def lease_tasks(self, ask: LeaseTasks) -> TaskLeases:
        return await self.wire.post("/tasks/lease", ask, TaskLeases, ask.wait + DEFAULT_DEADLINE)

    async def complete(self, news: CompleteTask, deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.post("/tasks/complete", news, Ack, deadline)

    async def fail(self, news: FailTask, deadline: float = DEFAULT_DEADLINE) -> Ack:
        return await self.wire.post("/tasks/fail", news, Ack, deadline)

    async def heartbeat(self, beat: Heartbeat, deadline: float = DEFAULT_DEADLINE) -> HeartbeatReply:
        return await self.wire.post("/nodes/heartbeat", beat, HeartbeatReply, deadline)

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

    async def put(self, rows: Sequence[dict[str, bytes]], deadline: float = DEFAULT_DEADLINE) -> list[Row]:
        """The rows are durable when this returns."""
        return (await self.wire.post("/unit/put", PutRows(rows=list(rows)), RowsPut, deadline)).rows

    async def unit(self, deadline: float = DEFAULT_DEADLINE) -> UnitInfo:
        return await self.wire.get("/unit/info", UnitInfo, deadline)

    async def close(self) -> None:
        await self.wire.close()

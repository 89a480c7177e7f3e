"""A run, reached through its dataflow service and its workers' file."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rillflow.clients.dataflow import DataflowClient
from rillflow.config.resources import Tag
from rillflow.dataflow.balance import Balance
from rillflow.errors import BadRequest, WireError
from rillflow.resources.placement import node_of
from rillflow.resources.workers import Worker, WorkersFile
from rillflow.types import NodeInfo, RetireNode

_DEADLINE = 10.0


class ServiceRun:
    """The live service of a run."""

    def __init__(self, client: DataflowClient) -> None:
        self._client = client

    async def ended(self) -> bool:
        return (await self._client.status(_DEADLINE)).phase == "ended"

    async def balance(self) -> Balance:
        try:
            return msgspec.convert(await self._client.balance(_DEADLINE), Balance)
        except msgspec.ValidationError as error:
            raise WireError(
                f"the balance report cannot be read: {error}", "use the same version of rillflow as the run"
            ) from error

    async def nodes(self) -> list[NodeInfo]:
        return (await self._client.nodes(_DEADLINE)).nodes

    async def retire(self, node: str, drain: float) -> None:
        try:
            await self._client.retire(RetireNode(node=node, drain=drain), _DEADLINE)
        except BadRequest:
            return  # no such node lives: it has gone already


class FileWorkers:
    """The run's own nodes, by RUN/workers.json; the run's supervisor carries out its changes."""

    def __init__(self, file: WorkersFile) -> None:
        self._file = file

    def playing(self) -> list[str]:
        if self._file.stamp() is None:
            return []
        return [node_of(w.name) for w in self._file.read() if w.tags == {"rollout"} and not w.lost]

    def take(self, node: str) -> None:
        self._change(node, lambda tags: tags - {"rollout"})

    def give(self, node: str) -> None:
        self._change(node, lambda tags: tags | {"rollout"})

    def _change(self, node: str, change: Callable[[frozenset[Tag]], frozenset[Tag]]) -> None:
        def changed(workers: list[Worker]) -> list[Worker]:
            return [
                msgspec.structs.replace(w, tags=frozenset(change(w.tags))) if node_of(w.name) == node else w
                for w in workers
            ]

        self._file.change(changed)

"""What a running run says of itself: asked of its dataflow service with a reader's token, when a browser wants it.

Nothing is asked while nobody looks. An answer is used for a second, and a service that does not answer is left alone
for a few, so that a dashboard of many tabs costs a run no more than one.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from rillflow.clients.dataflow import DataflowClient
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.dataflow.balance import Balance
from rillflow.errors import WireError
from rillflow.types import RetireNode
from rillflow.wire import Client

log = logging.getLogger(__name__)

FRESH = 1.0  # seconds for which an answer is used
_REST = 3.0  # seconds after a service has not answered
_PATIENCE = 2.0


class LiveRun:
    """The service of one run. `token` is the reader's; what the operator asks for carries the operator's own."""

    def __init__(self, run: WatchedRun, token: str) -> None:
        self._run = run
        self._token = token
        self._asking = asyncio.Lock()
        self._answer: Live | None = None
        self._until = 0.0

    async def now(self) -> Live | None:
        """The latest answer; None where the run is not running or does not answer."""
        async with self._asking:
            if time.monotonic() >= self._until:
                self._answer = await self._ask()
                self._until = time.monotonic() + (FRESH if self._answer is not None else _REST)
            return self._answer

    async def _ask(self) -> Live | None:
        url = self._run.folder.endpoint("dataflow") if self._run.running else None
        if url is None:
            return None
        client = DataflowClient(Client(url, self._token, peer="dataflow"))
        try:
            status = await client.status(_PATIENCE)
            nodes = await client.nodes(_PATIENCE)
            balance = msgspec.convert(await client.balance(_PATIENCE), Balance)
        except (WireError, msgspec.MsgspecError) as error:
            log.info("%s: %s", self._run.name, error)
            return None
        finally:
            await client.close()
        return Live(status, nodes.nodes, balance)

    async def stop(self, operator: str) -> None:
        """End the run; what is outstanding stays in its ledger."""
        client = self._operating(operator)
        try:
            await client.stop("stopped from the dashboard", _PATIENCE)
        finally:
            await client.close()

    async def retire(self, operator: str, ask: RetireNode) -> None:
        client = self._operating(operator)
        try:
            await client.retire(ask, _PATIENCE)
        finally:
            await client.close()

    def _operating(self, operator: str) -> DataflowClient:
        url = self._run.folder.endpoint("dataflow")
        if url is None or not self._run.running:
            raise WireError(f"{self._run.name} does not run", "only a running run can be told something")
        return DataflowClient(Client(url, operator, peer="dataflow"))

"""The status of a running run, from its dataflow service, with a reader's token.

The service is asked only for a browser's request. An answer is reused for a second, and a service that does not answer
is not asked again for a few, so that many tabs cost a run no more than one. The connection is kept between answers.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.dataflow.balance import Balance
from rillflow.errors import WireError
from rillflow.types import RetireNode

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
        self._client: DataflowClient | None = None
        self._url = ""

    async def now(self) -> Live | None:
        """The latest answer; None where the run is not running or does not answer."""
        async with self._asking:
            if time.monotonic() >= self._until:
                self._answer = await self._ask()
                self._until = time.monotonic() + (FRESH if self._answer is not None else _REST)
            return self._answer

    async def _ask(self) -> Live | None:
        url = self._run.folder.address if self._run.running else None
        if url is None:
            return None
        if self._client is None or url != self._url:
            await self.close()
            self._client, self._url = connect(url, self._token), url
        try:
            status = await self._client.status(_PATIENCE)
            nodes = await self._client.nodes(_PATIENCE)
            balance = msgspec.convert(await self._client.balance(_PATIENCE), Balance)
        except (WireError, msgspec.MsgspecError) as error:
            log.info("%s: %s", self._run.name, error)
            await self.close()
            return None
        return Live(status, nodes.nodes, balance)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def stop(self, operator: str) -> None:
        """End the run; outstanding work stays in its ledger."""
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
        url = self._run.folder.address
        if url is None or not self._run.running:
            raise WireError(f"{self._run.name} does not run", "only a running run takes commands")
        return connect(url, operator)

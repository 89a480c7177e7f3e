"""Keeps an engine on the head of its policy's weight store. A broken version is skipped, the old one stays."""

from __future__ import annotations

import asyncio
import logging
import time

from rillflow.contracts import Engine, WeightStore
from rillflow.errors import RillflowError

log = logging.getLogger(__name__)


class Refresher:
    """Pulls the head when it differs from what the engine serves, also when it moved back to an older line."""

    def __init__(self, policy: str, engine: Engine, store: WeightStore) -> None:
        self._policy = policy
        self._engine = engine
        self._store = store
        self._one_at_a_time = asyncio.Lock()
        self.seconds = 0.0
        self.loads = 0

    async def refresh(self) -> bool:
        """Whether a new version was loaded."""
        async with self._one_at_a_time:
            head: int | None = None
            try:
                head = self._store.head()
                if head is None or head == self._engine.version:
                    return False
                started = time.perf_counter()
                # Reading and hashing release the interpreter lock, so episodes go on meanwhile.
                tensors = await asyncio.to_thread(self._store.pull, head)
                await self._engine.load(tensors, head)
            except RillflowError as error:
                # The head may have moved on while it was read; a really broken version stays in the log.
                log.warning("policy %s: version %s not loaded: %s", self._policy, head, error)
                return False
            self.seconds += time.perf_counter() - started
            self.loads += 1
            return True

    async def run(self, every: float) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(every)

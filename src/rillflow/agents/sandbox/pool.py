"""Ready sandboxes. Each is used once; for each that is taken, another is made in the background.

At most `pool` sandboxes are ready and `running` runs go on at once; a run waits for its turn with a deadline. If the
first process died, the next run starts it again.

This is not the pool of worker processes (`agents.processes`): those are used again and again, these are forked from one
process and never serve a second run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rillflow.agents.sandbox.box import Box, Cell
from rillflow.agents.sandbox.interface import SandboxConfig
from rillflow.errors import SandboxError

_CLOSED = "the sandbox is closed"


class Pool:
    """The pool of one event loop, whose thread must live as long as the pool."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._cell = Cell(config)
        self._ready: deque[Box] = deque()
        self._used: set[Box] = set()
        self._turns = asyncio.Semaphore(config.running)
        self._filling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._fill()

    @asynccontextmanager
    async def boxes(self, count: int) -> AsyncIterator[list[Box]]:
        """Yield `count` fresh sandboxes for one run or one grading; they are ended afterwards."""
        try:
            async with asyncio.timeout(self.config.wait):
                await self._turns.acquire()
        except TimeoutError:
            raise SandboxError(
                f"no turn in the sandbox within {self.config.wait:g} seconds",
                "raise `running`, or ask for less at once",
            ) from None
        taken: list[Box] = []
        try:
            while len(taken) < count:
                taken.append(await self._take())
                self._used.add(taken[-1])
            yield taken
        finally:
            # The caller does not wait until the sandboxes have ended; the next turn does.
            task = asyncio.create_task(self._throw_away(taken))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _throw_away(self, boxes: list[Box]) -> None:
        try:
            for box in boxes:
                box.kill()
            await asyncio.gather(*(box.dispose() for box in boxes), return_exceptions=True)
        finally:
            self._used.difference_update(boxes)
            self._turns.release()
            self._fill()

    async def close(self) -> None:
        """End all sandboxes; runs that are under way fail."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        while self._ready:
            self._ready.pop().abandon()
        for box in self._used:
            box.kill()
        self._cell.close()

    async def _take(self) -> Box:
        while self._ready:
            box = self._ready.popleft()
            if box.fresh:
                return box
            box.abandon()
        return await self._make()

    async def _make(self) -> Box:
        if self._closed:
            raise SandboxError(_CLOSED)
        if not self._cell.alive:
            self._cell.close()
            self._cell = Cell(self.config)
        box = Box(self._cell, self.config.output)
        try:
            await box.up()
            if self._closed:
                raise SandboxError(_CLOSED)
        except BaseException:
            box.abandon()
            raise
        return box

    def _fill(self) -> None:
        if self._closed:
            return
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        while len(self._ready) < self.config.pool:
            try:
                self._ready.append(await self._make())
            except SandboxError:
                return  # the next run meets the same error and raises it

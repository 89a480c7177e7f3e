"""Keeps the processes of a run what its workers' tags ask for.

What runs is compared with what the plan wants, again and again, until they are the same: so it does not matter when
tags change, how often, or what else was under way. Who starts and ends processes is a `Carrier`: one for this machine,
one for a cluster.

Invariants: one change of a process at a time, and none starts before its predecessor of the same name has gone; tags
that the run could never get on with change nothing; a change of tags ends no node but by letting it drain, and no
trainer but by letting it write a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from rillflow.config import Recipe
from rillflow.errors import CorruptData, RunError
from rillflow.resources.placement import Placed, Plan, difference, plan, planned
from rillflow.resources.workers import Worker, WorkersFile

log = logging.getLogger(__name__)


class Carrier(Protocol):
    """Runs processes somewhere. What it starts it keeps alive until it is told to let go of it."""

    def start(self, process: Placed) -> None: ...

    async def retire(self, process: Placed) -> None:
        """Have a node drain; returns once it has gone, within a deadline of its own."""

    async def stop(self, process: Placed) -> None:
        """End a trainer, with time for its checkpoint; returns once it has gone."""


class Reconciler:
    """Carries out the plans of one run."""

    def __init__(self, recipe: Recipe, file: WorkersFile, carrier: Carrier) -> None:
        self._recipe = recipe
        self._file = file
        self._carrier = carrier
        self._plan: Plan | None = None
        self._running: dict[str, Placed] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._seen: tuple[int, int] | None = None

    @property
    def plan(self) -> Plan:
        assert self._plan is not None, "begin comes first"
        return self._plan

    def begin(self) -> None:
        """Start what the workers of the run are for. RunError where they could never get on."""
        self._seen = self._file.stamp()
        workers = self._file.read()
        self._adopt(plan(self._recipe, workers, planned(self._recipe, workers)))
        self._carry()

    def look(self) -> None:
        """Carry out what has changed since the last look; never waits. Raises what a change has failed with."""
        for name, task in list(self._changes.items()):
            if task.done():
                del self._changes[name]
                task.result()
        stamp = self._file.stamp()
        if stamp != self._seen:
            self._seen = stamp
            self._think_again()
        self._carry()

    def _think_again(self) -> None:
        try:
            wanted = plan(self._recipe, self._file.read(), self._plan)
        except (RunError, CorruptData) as error:
            log.error("a change of workers is left unheeded: %s", error)
        else:
            self._adopt(wanted)

    def lost(self, name: str) -> bool:
        """A process has gone for good. True where it was a node and the others can go on without its worker."""
        process = self._running.get(name)
        if process is None or process.role != "rollout":
            return False

        def without(workers: Iterable[Worker]) -> list[Worker]:
            return [
                msgspec.structs.replace(worker, lost=True) if worker.name in process.workers else worker
                for worker in workers
            ]

        try:
            wanted = plan(self._recipe, without(self._file.read()), self._plan)
        except RunError:
            return False
        del self._running[name]
        self._file.change(without)
        self._adopt(wanted)
        return True

    def is_changing(self, name: str) -> bool:
        """Whether a process is on its way out: that it ends then is no failure."""
        return name in self._changes

    async def close(self) -> None:
        """Leave everything as it is."""
        for task in self._changes.values():
            task.cancel()
        await asyncio.gather(*self._changes.values(), return_exceptions=True)

    def _adopt(self, wanted: Plan) -> None:
        """From now on this is the plan; it is written down beside the workers, for people and for who comes after."""
        self._plan = wanted
        if wanted.spares:
            log.info("without work: %s", ", ".join(wanted.spares))
        assigned = wanted.of_worker

        def noted(workers: list[Worker]) -> list[Worker]:
            return [
                msgspec.structs.replace(worker, process=process, rank=rank)
                for worker in workers
                for process, rank in [assigned.get(worker.name, ("", None))]
            ]

        self._file.change(noted)

    def _carry(self) -> None:
        """Begin every change that is due and not in the way of one that is under way."""
        due = difference(self._running, self.plan)
        for process in due.start:
            if process.name not in self._changes:
                self._start(process)
        for process in due.retire:
            self._change(process, self._retire(process))
        for old, new in due.restart:
            self._change(old, self._restart(old, new))

    def _change(self, process: Placed, work: Coroutine[Any, Any, None]) -> None:
        if process.name in self._changes:
            work.close()  # its turn comes when the one before it is over
            return
        self._changes[process.name] = asyncio.create_task(work, name=f"change-{process.name}")

    def _start(self, process: Placed) -> None:
        log.info("starting %s", process.name)
        self._running[process.name] = process
        self._carrier.start(process)

    async def _retire(self, process: Placed) -> None:
        log.info("%s is to go: it drains", process.name)
        await self._carrier.retire(process)
        del self._running[process.name]
        log.info("%s has gone", process.name)

    async def _restart(self, old: Placed, new: Placed) -> None:
        log.info("%s gets other workers (%s): it writes a checkpoint and begins anew", old.name, ", ".join(new.workers))
        await self._carrier.stop(old)
        del self._running[old.name]
        # Started at the next look, by the plan as it is then.

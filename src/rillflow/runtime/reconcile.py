"""Keeps the processes of a run as its workers' tags ask.

The running processes are compared with the plan repeatedly until they agree, so it does not matter when or how often
tags change. A `Carrier` starts and ends processes: one for this machine, one for a cluster.

Invariants: a process has one change at a time, and none starts before its predecessor of the same name has ended. Tags
with which the run could never progress change nothing. A node whose tags change drains before it ends; a trainer writes
a checkpoint.
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
    """Starts processes and keeps them alive until it is asked to end them."""

    def start(self, process: Placed) -> None: ...

    async def retire(self, process: Placed) -> None:
        """Drain a node; returns once it has ended, within the carrier's deadline."""

    async def stop(self, process: Placed) -> None:
        """Stop a trainer, with time for its checkpoint; returns once it has ended."""


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
        """Start the processes of the run's workers. Raises RunError if the run could never progress."""
        self._seen = self._file.stamp()
        workers = self._file.read()
        self._adopt(plan(self._recipe, workers, planned(self._recipe, workers)))
        self._carry()

    def look(self) -> None:
        """Begin the changes since the last call; never waits. Raises the exception of a failed change."""
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
        """Note that a process cannot be kept alive. Return whether the run can continue without its worker."""
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
        """Return whether a process is being changed, so that its end is not a failure."""
        return name in self._changes

    async def close(self) -> None:
        """Cancel pending changes; processes stay as they are."""
        for task in self._changes.values():
            task.cancel()
        await asyncio.gather(*self._changes.values(), return_exceptions=True)

    def _adopt(self, wanted: Plan) -> None:
        """Adopt the plan and record it beside the workers, for people and for a resumed run."""
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
        """Begin every change that is due and does not conflict with one under way."""
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
            work.close()  # it begins when the change before it has ended
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
        log.info("%s gets other workers (%s): it writes a checkpoint and restarts", old.name, ", ".join(new.workers))
        await self._carrier.stop(old)
        del self._running[old.name]
        # Started at the next look, by the plan as it is then.

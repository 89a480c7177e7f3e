"""A whole run on this machine: dataflow service, rollout nodes and trainers as supervised processes on loopback."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from rillflow.clients.dataflow import DataflowClient
from rillflow.errors import DeadlineExceeded, RunError, WireError
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.supervisor import ProcessSpec, Supervisor
from rillflow.types import Status
from rillflow.wire import Client

log = logging.getLogger(__name__)

POLL = 0.25
_END_GRACE = 10.0


def ended_well(status: Status) -> bool:
    """Whether the run did what it was asked for; a run that trained on nothing did not."""
    return status.reason in ("done", "out of prompts") and status.steps > 0


class LocalRun:
    """Starts, watches and ends the processes of one run folder."""

    def __init__(self, folder: RunFolder, on_status: Callable[[Status], None], *, resume: bool = False) -> None:
        self._folder = folder
        self._recipe = folder.recipe
        self._on_status = on_status
        self._resume = resume
        runtime = self._recipe.runtime
        self.supervisor = Supervisor(folder.root / "logs", runtime.restarts, runtime.threads)
        self._client: DataflowClient | None = None
        self._interrupted = asyncio.Event()

    async def run(self) -> Status | None:
        """The last status; raises RunError when the run could not be kept alive. Leaves no process behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted.set)
        with self._folder.locked():
            self._folder.set_state("running")
            try:
                status = await self._unless_interrupted(self._run())
            except BaseException as error:
                self._folder.set_state("failed", str(error))
                raise
            finally:
                await self.supervisor.stop()
                if self._client is not None:
                    await self._client.close()
            self._note_end(status)
            return status

    async def _unless_interrupted(self, work: Coroutine[Any, Any, Status]) -> Status | None:
        running = asyncio.ensure_future(work)
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait((running, interrupted), return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            for task in (running, interrupted):
                task.cancel()
            await asyncio.gather(running, interrupted, return_exceptions=True)

    async def _run(self) -> Status:
        self._client = await self._start_dataflow()
        for index in range(self._recipe.rollout.nodes):
            name = f"rollout-{index}"
            self.supervisor.start(ProcessSpec(name, ("rollout", str(self._folder.root), "--name", name)))
        for policy in self._recipe.policies:
            arguments = ("trainer", str(self._folder.root), "--policy", policy)
            self.supervisor.start(ProcessSpec(f"trainer-{policy}", arguments))
        status = await self._follow(self._client)
        # Trainers and nodes see the end themselves and finish what they write; the service stays for them.
        await self._finish()
        return status

    async def _start_dataflow(self) -> DataflowClient:
        before = self._folder.endpoint("dataflow")
        arguments = ("dataflow", str(self._folder.root), *(("--resume",) if self._resume else ()))
        process = self.supervisor.start(ProcessSpec("dataflow", arguments))
        deadline = asyncio.get_running_loop().time() + self._recipe.runtime.start_timeout
        while asyncio.get_running_loop().time() < deadline:
            self.supervisor.check()
            url = self._folder.endpoint("dataflow")
            if url is not None and (before is None or process.pid is not None):
                client = DataflowClient(Client(url, self._folder.token, peer="dataflow"))
                try:
                    await client.status(deadline=1.0)
                    return client
                except WireError:
                    await client.close()
            await asyncio.sleep(0.05)
        raise RunError("the dataflow service did not start in time", f"see {process.log_path}")

    async def _follow(self, client: DataflowClient) -> Status:
        """Show each status until the run has ended; a service that is being restarted is waited for."""
        while True:
            self.supervisor.check()
            try:
                status = await client.status(deadline=5.0)
            except DeadlineExceeded:
                log.warning("waiting for the dataflow service to answer")
                continue
            self._on_status(status)
            if status.phase == "ended":
                return status
            await asyncio.sleep(POLL)

    async def _finish(self) -> None:
        others = [p for p in self.supervisor.processes if p.spec.name != "dataflow"]
        await asyncio.gather(*(process.wait(_END_GRACE) for process in others))

    def _note_end(self, status: Status | None) -> None:
        if status is None:
            self._folder.set_state("stopped", "interrupted")
        elif ended_well(status):
            self._folder.set_state("finished", status.reason)
        else:
            self._folder.set_state("failed", status.reason)

"""A whole run on this machine: dataflow service, storage units, engine processes where the recipe wants them, rollout
nodes and trainers, one for each policy, as supervised processes on loopback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from rillflow.clients.dataflow import DataflowClient
from rillflow.errors import DeadlineExceeded, RunError, StorageError, WireError
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import STOP_SIGNALS, ignored, was_asked_to_stop
from rillflow.runtime.supervisor import ProcessSpec, Supervised, Supervisor
from rillflow.types import Status
from rillflow.wire import Client

log = logging.getLogger(__name__)

POLL = 0.25
# For the last checkpoint of a trainer and the last words of nodes.
_END_GRACE = 60.0
# For a predecessor that was killed a moment ago to let go of its port.
_PORT_PATIENCE = 5.0


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
        self._furthest = 0

    async def run(self) -> Status | None:
        """The last status; raises RunError when the run could not be kept alive. Leaves no process behind."""
        self._listen_for_signals()
        with self._folder.locked():
            self._folder.set_state("running")
            try:
                status = await self._unless_interrupted(self._run())
            except BaseException as error:
                with suppress(StorageError):  # on a full disk the error itself matters more
                    self._folder.set_state("failed", str(error))
                raise
            finally:
                await self.supervisor.stop()
                if self._client is not None:
                    await self._client.close()
            self._note_end(status)
            return status

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if not ignored(number):
                loop.add_signal_handler(number, self._interrupted.set)
        if was_asked_to_stop():
            self._interrupted.set()

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
        units = [f"unit-{index}" for index in range(self._recipe.dataflow.units.count)]
        for name in units:
            self._start(name, "unit", "--name", name)
        servers = ["weights"] if self._recipe.runtime.weights_server else []
        for name in servers:
            self._start(name, "weights")
        engines = [f"engine-{index}" for index in range(self._recipe.rollout.engines)]
        for name in engines:
            self._start(name, "engine", "--name", name)
        # Colocated, every trainer plays by itself.
        nodes = self._recipe.rollout.nodes if self._recipe.mode == "asynchronous" else 0
        for index in range(nodes):
            self._start(f"rollout-{index}", "rollout", "--name", f"rollout-{index}")
        for policy in self._recipe.policies:
            self._start(f"trainer-{policy}", "trainer", "--policy", policy)
        status = await self._follow(self._client)
        # Trainers and nodes see the end themselves and finish what they write; the others stay for them.
        await self.supervisor.finish(_END_GRACE, keep={"dataflow", *units, *engines, *servers})
        return status

    def _start(self, name: str, role: str, *options: str) -> Supervised:
        return self.supervisor.start(ProcessSpec(name, (role, str(self._folder.root), *options)))

    async def _start_dataflow(self) -> DataflowClient:
        await settle_port(self._folder)
        process = self._start("dataflow", "dataflow", *(("--resume",) if self._resume else ()))
        deadline = asyncio.get_running_loop().time() + self._recipe.runtime.start_timeout
        while asyncio.get_running_loop().time() < deadline:
            self.supervisor.check()
            url = self._folder.endpoint("dataflow")
            if url is not None and process.pid is not None and (client := await self._reached(url)):
                return client
            await asyncio.sleep(0.05)
        raise RunError("the dataflow service did not start in time", f"see {process.log_path}")

    async def _reached(self, url: str) -> DataflowClient | None:
        """A client of the service at `url`, once it answers."""
        client = DataflowClient(Client(url, self._folder.token, peer="dataflow"))
        try:
            await client.status(deadline=1.0)
        except BaseException as error:
            await client.close()
            if isinstance(error, WireError):
                return None
            raise
        return client

    async def _follow(self, client: DataflowClient) -> Status:
        """Show each status until the run has ended. A service that does not answer is waited for, then replaced."""
        clock, patience = asyncio.get_running_loop().time, self._recipe.runtime.start_timeout
        heard = clock()
        while True:
            self.supervisor.check()
            try:
                status = await client.status(deadline=5.0)
            except DeadlineExceeded:
                log.warning("waiting for the dataflow service to answer")
                if clock() - heard > patience:
                    log.error("the dataflow service has not answered for %.0f s: killed", patience)
                    self.supervisor.kill("dataflow")
                    heard = clock()
                continue
            heard = clock()
            self._on_status(status)
            self._note_progress(status)
            if status.phase == "ended":
                return status
            await asyncio.sleep(POLL)

    def _note_progress(self, status: Status) -> None:
        """Steps of all policies count; a rollback is no progress until what it took back is made good."""
        steps = sum(policy.steps for policy in status.policies.values()) or status.steps
        if steps > self._furthest:
            self._furthest = steps
            self.supervisor.progressed()

    def _note_end(self, status: Status | None) -> None:
        if status is None:
            self._folder.set_state("stopped", "interrupted")
        elif ended_well(status):
            self._folder.set_state("finished", status.reason)
        else:
            self._folder.set_state("failed", status.reason)


async def settle_port(folder: RunFolder, patience: float = _PORT_PATIENCE) -> None:
    """See that the dataflow service can come back where it was, and if another program holds its port, elsewhere.

    For the start of a run: later its peers look for it where it has been.
    """
    port, deadline = folder.last_port("dataflow"), time.monotonic() + patience
    while port and not _is_free(folder.recipe.runtime.host, port):
        if time.monotonic() >= deadline:
            folder.forget_endpoint("dataflow")
            return
        await asyncio.sleep(0.1)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True

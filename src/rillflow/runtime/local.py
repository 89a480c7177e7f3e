"""A whole run on this machine as supervised processes on loopback: dataflow services, storage units, engine processes
if the recipe wants them, and the processes of the workers (rollout nodes, and a trainer for each policy).

Tags may change while it runs (RUN/workers.json): nodes come, or drain and go; a trainer whose workers change writes a
checkpoint and goes on from it. A node that cannot be kept alive is left out while others can do its work; any other
process that cannot be kept alive ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect
from rillflow.errors import BadRequest, DeadlineExceeded, RillflowError, RunError, StorageError, WireError
from rillflow.resources.placement import Placed, ledgers, maintainers, services
from rillflow.resources.workers import measured, with_rooflines
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.maintaining import end_nodes
from rillflow.runtime.preloaded import Preloaded
from rillflow.runtime.process import STOP_SIGNALS, bind_host, ignored, was_asked_to_stop
from rillflow.runtime.reconcile import Reconciler
from rillflow.runtime.supervisor import OnDemand, ProcessSpec, Supervised, Supervisor
from rillflow.runtime.warm import SHARED_MODULES, EarlyServer, available
from rillflow.storage.startup import Starting, starting
from rillflow.types import DONE, GOOD_ENDS, OUT_OF_PROMPTS, TARGET_REACHED, LookEngines, RetireNode, Status

log = logging.getLogger(__name__)

POLL = 0.25
# For the last checkpoint of a trainer and the last reports of nodes.
_END_GRACE = 60.0
_GOODBYE = 5.0  # several beats of an engine
# For a predecessor that was killed a moment ago to let go of its port.
_PORT_PATIENCE = 5.0
# For the dataflow service to learn of a retirement, and, beyond the time to drain, for the node's process to end.
_RETIRE_PATIENCE = 30.0
_NODE_GRACE = 3.0
_HEAVY = ("engine", "rollout", "stage", "trainer")  # the roles that import torch
_DASHBOARD = "dashboard"
_SEEN_BY_ALL = (DONE, OUT_OF_PROMPTS)  # reasons that every ledger detects alone


def ended_well(status: Status) -> bool:
    """Return whether the run ended successfully; a run that trained on nothing did not."""
    return status.reason == TARGET_REACHED or (status.reason in GOOD_ENDS and status.steps > 0)


class LocalRun:
    """Starts, watches and ends the processes of one run folder.

    `on_status` gets each status of the run; `on_starting` gets, until the service answers, the processes that have not
    started yet. With `on_dashboard`, which gets its address, the run has a dashboard. `early` is a fork
    server that is importing already.
    """

    def __init__(
        self,
        folder: RunFolder,
        on_status: Callable[[Status], None],
        *,
        resume: bool = False,
        on_starting: Callable[[list[Starting]], None] = lambda parts: None,
        on_dashboard: Callable[[str], None] | None = None,
        early: EarlyServer | None = None,
    ) -> None:
        self._folder = folder
        self._recipe = folder.recipe
        self._on_status = on_status
        self._on_starting = on_starting
        self._on_dashboard = on_dashboard
        self._dashboard: OnDemand | None = None
        self._resume = resume
        runtime = self._recipe.runtime
        self._preloaded = self._fork_server(early)
        self.supervisor = Supervisor(folder.root / "logs", runtime.restarts, runtime.threads, preloaded=self._preloaded)
        self._client: DataflowClient | None = None
        self._workers = Reconciler(self._recipe, folder.workers, self)
        self._optional = {_DASHBOARD, *(process.name for process in maintainers(self._recipe))}
        self._finished: set[str] = set()
        self._interrupted = asyncio.Event()
        self._furthest = 0

    async def run(self) -> Status | None:
        """Run to the end and return the last status. Raises RunError if the run could not be kept alive. Leaves no
        process."""
        self._listen_for_signals()
        with self._folder.locked():
            self._folder.set_state("running")
            try:
                await self._begin()
                status = await self._unless_interrupted(self._run())
            except BaseException as error:
                with suppress(StorageError):  # on a full disk the error itself matters more
                    self._folder.set_state("failed", str(error))
                raise
            finally:
                await self._workers.close()
                await self.supervisor.stop()
                self._close_dashboard()
                await self._end_joined()
                await self._end()
                if self._client is not None:
                    await self._client.close()
            self._note_end(status)
            return status

    def _fork_server(self, early: EarlyServer | None) -> Preloaded | None:
        """Return the fork server for the processes that import torch, or None if it cannot be used."""
        runtime = self._recipe.runtime
        if not runtime.preload or not available():
            return None
        # Trainers that also play import what nodes import.
        modules = (
            SHARED_MODULES if self._recipe.mode == "asynchronous" else (*SHARED_MODULES, "rillflow.runtime.hosted")
        )
        return Preloaded(self._folder.root, self._folder.log("forkserver"), runtime.threads, modules, early)

    async def _begin(self) -> None:
        """Prepare the run before any process starts."""

    async def _end(self) -> None:
        """Clean up after all processes have stopped."""

    async def _end_joined(self) -> None:
        """End the nodes that a maintainer has started, which are not children of this process."""
        try:
            await end_nodes(self._folder)
        except RillflowError as error:  # the result of the run itself matters more
            log.warning("%s", error)

    def _listen_for_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            return
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
        if self._preloaded is not None:
            self._preloaded.begin()
        self._open_dashboard()
        self._client = await self._start_dataflow()
        around = services(self._recipe)
        for process in around:
            self._launch(process)
        await asyncio.to_thread(self._prepare_workers)
        self._workers.begin()
        for process in maintainers(self._recipe):
            self._launch(process)
        status = await self._follow(self._client)
        await self._workers.close()
        # Trainers and nodes see the end themselves and finish what they write; the others stay for them.
        stay = {process.name for process in (*ledgers(self._recipe), *around)}
        await self.supervisor.finish(_END_GRACE, keep=stay | {_DASHBOARD})
        await self._say_goodbye(self._client)
        return status

    async def _say_goodbye(self, client: DataflowClient) -> None:
        """Keep the service until engines that have joined have learnt of the end by their next heartbeat."""
        with suppress(RillflowError, TimeoutError):
            async with asyncio.timeout(_GOODBYE):
                while (await client.engines(LookEngines())).engines:  # noqa: ASYNC110 - another process knows
                    await asyncio.sleep(0.1)

    def _prepare_workers(self) -> None:
        """Return the workers of the recipe, or those of the resumed run, measured if the choice of trainers depends on
        it."""
        file = self._folder.workers
        known = measured(self._recipe, file.prepare(self._recipe))
        file.change(lambda workers: with_rooflines(workers, known))

    def _launch(self, process: Placed) -> Supervised:
        """Start a process of the run."""
        heavy = process.role in _HEAVY
        return self.supervisor.start(ProcessSpec(process.name, process.arguments(self._folder.root), heavy))

    # ------------------------------------------------------------ the dashboard

    def _open_dashboard(self) -> None:
        """Offer the dashboard, at its earlier port if possible. Its process starts at the first connection."""
        if self._on_dashboard is None:
            return
        try:
            self._dashboard = OnDemand(self._start_dashboard, self._folder.last_port(_DASHBOARD))
            self._folder.publish_endpoint(_DASHBOARD, self._dashboard.url)
        except (OSError, StorageError) as error:
            log.warning("the run has no dashboard: %s", error)
        else:
            self._on_dashboard(self._dashboard.url)

    def _start_dashboard(self, handle: int) -> None:
        arguments = (_DASHBOARD, str(self._folder.root), "--handle", str(handle))
        self.supervisor.start(ProcessSpec(_DASHBOARD, arguments, handles=(handle,)))

    def _close_dashboard(self) -> None:
        if self._dashboard is not None:
            self._dashboard.close()
            self._dashboard = None

    # ------------------------------------------------------------ what the tags ask for (reconcile.Carrier)

    def start(self, process: Placed) -> None:
        self._launch(process)

    async def retire(self, process: Placed) -> None:
        drain = self._recipe.resources.scaling.drain
        patience = drain + _NODE_GRACE if await self._told_to_go(process.name, drain) else 0.0
        if not await self.supervisor.let_go(process.name, patience):
            await self.supervisor.stop_one(process.name, _NODE_GRACE)

    async def _told_to_go(self, node: str, drain: float) -> bool:
        """Ask the service to retire the node; returns False if it does not know the node."""
        assert self._client is not None, "the service comes first"
        clock = asyncio.get_running_loop().time
        deadline = clock() + _RETIRE_PATIENCE
        while clock() < deadline:
            try:
                return (await self._client.retire(RetireNode(node=node, drain=drain), deadline=5.0)).accepted
            except BadRequest:
                return False
            except WireError as error:
                log.warning("the dataflow service has not heard yet that %s is to go: %s", node, error.message)
                await asyncio.sleep(POLL)
        return False

    async def stop(self, process: Placed) -> None:
        await self.supervisor.stop_one(process.name, self._recipe.resources.grace)

    def _heed_deaths(self) -> None:
        """Raise the error of a process that cannot be kept alive, unless the run can continue without it."""
        for name, error in self.supervisor.failures().items():
            if not self._workers.is_changing(name):
                if name not in self._optional and not self._workers.lost(name):
                    raise error
                log.warning("the run goes on without %s: %s", name, error)
            if name == _DASHBOARD:
                self._close_dashboard()
            self.supervisor.forget(name)

    def _heed_goodbyes(self, status: Status) -> None:
        """Free the workers of nodes that were retired. At the end of a run all nodes leave, which needs no action."""
        finished = self.supervisor.finished() if status.phase == "training" else set()
        for name in finished & self._finished:
            if not self._workers.is_changing(name) and self._workers.lost(name):
                log.warning("%s has left; `rillflow tags` gives its worker something to do again", name)
                self.supervisor.forget(name)
        self._finished = finished

    # ------------------------------------------------------------ the service

    async def _start_dataflow(self) -> DataflowClient:
        """Start the service of every ledger; returns a client of all of them."""
        started = []
        for process in ledgers(self._recipe):
            await settle_port(self._folder, process.name)
            options = (*process.options, "--resume") if self._resume else process.options
            started.append(self._launch(replace(process, options=options)))
        deadline = asyncio.get_running_loop().time() + self._recipe.runtime.start_timeout
        while asyncio.get_running_loop().time() < deadline:
            self.supervisor.check()
            self._on_starting(self._starting())
            address = self._folder.address if all(process.pid is not None for process in started) else None
            if address is not None and (client := await self._reached(address)):
                return client
            await asyncio.sleep(0.05)
        raise RunError("the dataflow service did not start in time", f"see {started[0].log_path}")

    async def _reached(self, address: str) -> DataflowClient | None:
        """Return a client of the run at `address`, once it answers."""
        client = connect(address, self._folder.token)
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
            self._heed_deaths()
            self._workers.look()
            self._on_starting(self._starting())
            try:
                status = await client.status(deadline=5.0)
            except DeadlineExceeded:
                log.warning("waiting for the dataflow service to answer")
                if clock() - heard > patience:
                    await self._kill_silent(patience)
                    heard = clock()
                continue
            heard = clock()
            await self._end_together(client, status)
            self._on_status(status)
            self._note_progress(status)
            self._heed_goodbyes(status)
            if status.phase == "ended":
                return status
            await asyncio.sleep(POLL)

    async def _kill_silent(self, patience: float) -> None:
        """Kill the services that do not answer; the supervisor starts them again."""
        for process in ledgers(self._recipe):
            url = self._folder.endpoint(process.name)
            client = await self._reached(url) if url is not None else None
            if client is None:
                log.error("the service %s has not answered for %.0f s: killed", process.name, patience)
                self.supervisor.kill(process.name)
            else:
                await client.close()

    async def _end_together(self, client: DataflowClient, status: Status) -> None:
        """Stop the other ledgers where one has ended for a reason that they do not see themselves."""
        if self._recipe.dataflow.ledgers > 1 and status.phase == "finishing" and status.reason not in _SEEN_BY_ALL:
            with suppress(RillflowError):  # asked again with the next status
                await client.stop(status.reason)

    def _starting(self) -> list[Starting]:
        """Return the processes that are starting or restarting. The run does not wait for optional ones."""
        now = time.time()
        parts = (
            starting(self._folder.root, process.spec.name, process.began, now, process.first_stage)
            for process in self.supervisor.processes
            if process.spec.name not in self._optional
        )
        return [part for part in parts if part is not None]

    def _note_progress(self, status: Status) -> None:
        """Record progress: the steps of all policies. After a rollback, only steps beyond the earlier maximum count."""
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


async def settle_port(folder: RunFolder, process: str = "dataflow", patience: float = _PORT_PATIENCE) -> None:
    """Choose a dataflow service's port: the earlier one, or another if a different program holds it.

    Only for the start of a run: later the service's peers use the earlier address.
    """
    port, deadline = folder.last_port(process), time.monotonic() + patience
    while port and not _is_free(bind_host(folder.recipe), port):
        if time.monotonic() >= deadline:
            folder.forget_endpoint(process)
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

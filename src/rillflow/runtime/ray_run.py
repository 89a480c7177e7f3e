"""A whole run on a Ray cluster: the same plan as on one machine, with its workers placed on the cluster's nodes.

The dataflow service, the storage units, the weight server and the maintainer use the run folder and run as processes on
the driver's node. Ray places rollout nodes, engines and stages, which need only the service's address and a token, and
the ranks of trainers, which need the run folder.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rillflow.errors import RunError
from rillflow.resources.placement import Placed
from rillflow.resources.ray_cluster import (
    FOLDER,
    Offers,
    RayCluster,
    namespace_of,
    sampling_gpus,
    training_gpus,
    wants_of,
)
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.local import LocalRun
from rillflow.runtime.process import HOST_ENV, STOP_SIGNALS, role_environment
from rillflow.runtime.ray_gang import Gang, Member, Place, Room
from rillflow.runtime.supervisor import Supervised
from rillflow.runtime.warm import EarlyServer
from rillflow.storage import write_json
from rillflow.storage.startup import Starting
from rillflow.types import Status, TokenScope

log = logging.getLogger(__name__)

TOKEN_ENV = "RILLFLOW_TOKEN"


class RayRun(LocalRun):
    """Starts, watches and ends the processes of one run folder, on the cluster at `address`; without one, on a cluster
    of this machine alone, which ends with the run."""

    def __init__(
        self,
        folder: RunFolder,
        on_status: Callable[[Status], None],
        *,
        resume: bool = False,
        on_starting: Callable[[list[Starting]], None] = lambda parts: None,
        on_dashboard: Callable[[str], None] | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(folder, on_status, resume=resume, on_starting=on_starting, on_dashboard=on_dashboard)
        if not self._recipe.runtime.weights_server:
            raise RunError(
                "nodes of a cluster fetch weights over HTTP, and this run serves none",
                f"set `weights_server: true` under `runtime` in {folder.root / 'recipe.yaml'}",
            )
        self._address = address
        self._cluster = RayCluster(run_name(folder), uuid.uuid4().hex)
        self._offers = Offers(())
        patience = self._recipe.runtime.start_timeout
        # If trainers roll out as well, the run progresses without nodes.
        self._node_room = Room(patience if self._recipe.mode == "asynchronous" else math.inf)

    def _fork_server(self, early: EarlyServer | None) -> None:
        """Return None: Ray places the processes that import torch."""
        return

    async def _begin(self) -> None:
        with _own_signals():
            self._cluster.connect(self._address, namespace_of(run_name(self._folder)))
        os.environ[HOST_ENV] = self._cluster.own_address  # processes on other hosts call those of this machine
        self._offers = await self._cluster.offers()
        if not self._offers.tagged:
            log.warning(
                "no node of the cluster offers `rollout` or `train`: every worker takes a CPU%s",
                " and a GPU" if self._offers.gpus else "",
            )
        # For the maintainer, which starts further nodes.
        known = {"address": self._cluster.address, "run": run_name(self._folder), "gpus": sampling_gpus(self._recipe)}
        write_json(self._folder.root / "ray.json", known)

    async def _end(self) -> None:
        self._cluster.close()

    def _launch(self, process: Placed) -> Supervised:
        match process.role:
            case "rollout":
                return self._place(process.name, [self._joining(process)], self._node_room, "node")
            case "engine":
                return self._place(process.name, [self._joining(process)], self._own_room(), "node")
            case "stage":
                return self._place(process.name, [self._joining(process)], self._own_room(), "stage")
            case "trainer":
                members = [self._rank(process, rank) for rank in range(process.ranks)]
                return self._place(process.name, members, self._own_room())
            case _:
                return super()._launch(process)

    def _own_room(self) -> Room:
        return Room(self._recipe.runtime.start_timeout)

    def _place(self, name: str, members: list[Member], room: Room, scope: TokenScope | None = None) -> Supervised:
        """Return a gang. The token of `scope` is in its environment, because other users can see argument lists."""
        runtime = self._recipe.runtime
        path = {"PYTHONPATH": value} if (value := os.environ.get("PYTHONPATH")) else {}
        environment = (
            role_environment(runtime.threads) | path | ({TOKEN_ENV: self._folder.token_of(scope)} if scope else {})
        )
        gang = Gang(name, members, self._cluster, environment=environment, restarts=runtime.restarts, room=room)
        return self.supervisor.add(gang)

    def _joining(self, process: Placed) -> Member:
        """Return the member for a node, an engine process or a stage, which needs nothing of the run folder."""

        def arguments(place: Place) -> list[str]:
            url = self._folder.endpoint("dataflow")
            assert url is not None, "the service comes first"
            # A node that is asked to stop ends at once, as on one machine; retiring it lets it drain.
            grace = ("--grace", "0") if process.role == "rollout" else ()
            listens = () if process.role == "stage" else ("--host", place.address, "--cache", FOLDER)
            return [process.role, "--join", url, *process.options, *listens, *grace]

        if process.role == "stage":
            gpus = training_gpus(self._recipe, process.policy) if self._offers.gpus else 0
            wants = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
            return Member(process.name, wants, self._folder.log(process.name), arguments)
        # Engine processes have the devices, if the run has any.
        samples = process.role == "engine" or not self._recipe.rollout.engines
        wants = wants_of(("rollout",), self._offers, sampling_gpus(self._recipe)) if samples else {"CPU": 1.0}
        return Member(process.name, wants, self._folder.log(process.name), arguments)

    def _rank(self, process: Placed, rank: int) -> Member:
        name = process.name if rank == 0 else f"{process.name}-rank{rank}"
        plays = rank in process.playing
        gpus = training_gpus(self._recipe, process.policy)
        wants = wants_of(("train", "rollout") if plays else ("train",), self._offers, gpus)

        def arguments(place: Place) -> list[str]:
            alone = [*process.arguments(self._folder.root)]
            if process.ranks == 1:
                return alone
            given = [] if "--ranks" in alone else ["--ranks", str(process.ranks)]
            return [*alone, *given, "--rank", str(rank), "--rendezvous", place.rendezvous]

        return Member(name, wants, self._folder.log(name), arguments)


def run_name(folder: RunFolder) -> str:
    """Return the name of a run on a cluster: its folder's name and a hash of its token."""
    return f"{folder.root.name}-{hashlib.sha256(folder.token.encode()).hexdigest()[:8]}"


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the run's own handler of SIGTERM, which Ray replaces."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

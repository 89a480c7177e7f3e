"""Rollout nodes on a Ray cluster, for a maintainer: each is the process of a detached actor, named after the node.

Detached actors outlive their maintainer, and a restarted maintainer finds them by their names. A node that has ended
keeps its actor for some minutes, so that a maintainer learns of it; then the actor exits, and nothing of a run stays on
the cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rillflow.errors import RunError
from rillflow.resources.ray_cluster import (
    FOLDER,
    RoleHost,
    actor_resources,
    connect,
    namespace_of,
    offers,
    wants_of,
)
from rillflow.storage import read_json

log = logging.getLogger(__name__)

TOKEN_ENV = "RILLFLOW_TOKEN"
LINGER = 600.0
_CALL = 10.0
_DEADLINE = 60.0  # of any of the executor's methods; connecting takes most of it
_STOP = 5.0  # for a node to end when it is asked to

T = TypeVar("T")


class RayExecutor:
    """`contracts.Executor`. `run` is the same for every maintainer of a run, `url` that of its dataflow service; `gpus`
    are those of a node, where the cluster has any."""

    def __init__(self, url: str, token: str, *, run: str, address: str, gpus: int = 1) -> None:
        self._gpus = gpus
        self._url = url
        self._token = token
        self._run = run
        self._address = address
        self._started: set[str] = set()
        self._connected = False

    @classmethod
    def of(cls, root: Path, url: str, token: str) -> RayExecutor:
        """Return an executor on the cluster of the run in this folder, or else on the one that RAY_ADDRESS names."""
        path, address = root / "ray.json", os.environ.get("RAY_ADDRESS", "")
        if path.is_file():
            known = read_json(path)
            return cls(url, token, run=known["run"], address=known["address"], gpus=known["gpus"])
        if not address:
            raise RunError(
                "the maintainer is to start nodes on Ray, and nothing says on which cluster",
                "start the run with --runtime ray, or set RAY_ADDRESS=HOST:PORT",
            )
        return cls(url, token, run=root.name, address=address)

    async def start(self, node: str) -> None:
        await self._within(lambda: self._start(node))
        self._started.add(node)

    async def stop(self, node: str) -> None:
        await self._within(lambda: self._stop(node))
        self._started.discard(node)

    async def nodes(self) -> dict[str, bool]:
        return dict.fromkeys(self._started, False) | await self._within(self._nodes)

    async def log(self, node: str) -> str:
        """Return the end of a node's output."""
        actor = await self._within(lambda: _handle(node))
        return "" if actor is None else str(await self._within(lambda: _ask(actor, "tail", "")))

    async def close(self) -> None:
        if self._connected:
            import ray

            await asyncio.to_thread(ray.shutdown)
            self._connected = False

    async def _within(self, work: Callable[[], T]) -> T:
        """Run a call in a thread: Ray's calls block, and from a thread Ray leaves the process's signals alone."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._connected_for, work), _DEADLINE)
        except TimeoutError as error:
            raise RunError(f"the Ray cluster at {self._address} does not answer", "see `ray status`") from error

    def _connected_for(self, work: Callable[[], T]) -> T:
        if not self._connected:
            connect(self._address, namespace_of(self._run))
            self._connected = True
        return work()

    def _start(self, node: str) -> None:
        """Start the node. An existing actor of this name was started by a maintainer that died before it recorded
        it."""
        import ray

        wants = wants_of(("rollout",), offers(), self._gpus)
        options: dict[str, Any] = actor_resources(wants) | {
            "name": node,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
        }
        actor: Any = ray.remote(RoleHost).options(**options).remote(node, self._run, "log", LINGER)
        if not _ask(actor, "running", False):
            spec = {
                "arguments": ["rollout", "--join", self._url, "--name", node, "--cache", FOLDER],
                "environment": {TOKEN_ENV: self._token},
                "cwd": os.getcwd(),
            }
            actor.start.remote(json.dumps(spec))  # once it has room

    def _stop(self, node: str) -> None:
        import ray

        actor = _handle(node)
        if actor is None:
            return
        deadline = time.monotonic() + _STOP
        actor.signal.remote(int(signal.SIGTERM))
        while _ask(actor, "running", False) and time.monotonic() < deadline:
            time.sleep(0.1)
        _ask(actor, "forget", None)
        ray.kill(actor)

    def _nodes(self) -> dict[str, bool]:
        """Return the nodes. One that waits for resources counts as running."""
        import ray
        from ray.util import list_named_actors

        asked = {name: actor.running.remote() for name in list_named_actors() if (actor := _handle(name)) is not None}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_CALL) if asked else ([], [])
        return {name: _heard(answer) if answer in answered else True for name, answer in asked.items()}


def _heard(answer: Any) -> bool:
    import ray
    from ray.exceptions import RayActorError

    try:
        return bool(ray.get(answer))
    except RayActorError:
        return False


def _handle(node: str) -> Any:
    import ray

    try:
        return ray.get_actor(node)
    except ValueError:  # no actor has this name
        return None


def _ask(actor: Any, method: str, otherwise: object) -> object:
    """Return the actor's answer, or `otherwise` if it has gone or does not answer in time (it may wait for
    resources)."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(getattr(actor, method).remote(), timeout=_CALL)
    except (GetTimeoutError, RayActorError):
        return otherwise

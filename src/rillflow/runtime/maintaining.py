"""The maintainer's process: of a run folder, or of a run that is reached by its URL alone.

One process maintains a run at a time (a lock in its folder). Its nodes stay when it is stopped or killed, and end with
the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rillflow.clients.dataflow import DataflowClient
from rillflow.config import Recipe
from rillflow.errors import ConfigError, RunError
from rillflow.resources.executors import Home, build_executor
from rillflow.resources.maintainer.loop import Maintainer
from rillflow.resources.maintainer.pool import Book, Line
from rillflow.resources.maintainer.upkeep import FileWorkers, ServiceRun, Workers
from rillflow.resources.workers import WorkersFile
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.process import child_environment, prepare, run_until_signal
from rillflow.runtime.roles import PREDECESSOR_WAIT, wait_for_endpoint
from rillflow.storage import disk_errors
from rillflow.wire import Client
from rillflow.wire.tokens import scoped_token

log = logging.getLogger(__name__)

_ENDING = 60.0  # seconds for all nodes of a run that is given up


@dataclass(frozen=True)
class Place:
    """A maintainer's folder and its run. `token` is the operator's; the nodes that it starts get the node's."""

    folder: RunFolder
    recipe: Recipe
    url: str
    token: str
    workers: Workers | None = None

    @property
    def home(self) -> Home:
        root, token = self.folder.root, scoped_token(self.token, "node")
        return Home(root, self.url, token, _token_file(root, token), _environment(self.recipe, token))


async def place_of(folder: RunFolder) -> Place:
    """Return the place for a run folder, once its service answers, within a minute."""
    url = await wait_for_endpoint(folder, "dataflow")
    return Place(folder, folder.recipe, url, folder.token, FileWorkers(WorkersFile(folder.root)))


async def place_at(url: str, token: str, folder: Path) -> Place:
    """Return the place for a run that is reached by its URL; `folder` keeps the maintainer's state."""
    from rillflow.clients.joining import join

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    joined = await join(url, token, folder)
    if joined.keyring.scope_of(token) != "operator":
        raise ConfigError(
            "a maintainer needs the operator's token: it retires nodes",
            "give it the one that `rillflow token RUN operator` prints",
        )
    return Place(RunFolder(folder.resolve()), joined.recipe, joined.url, token)


@asynccontextmanager
async def maintainer(
    place: Place, *, dry_run: bool = False, follow: bool = True, say: Callable[[Line], None] = lambda line: None
) -> AsyncIterator[Maintainer]:
    if place.recipe.dataflow.ledgers > 1:
        raise ConfigError(
            "a maintainer needs a run with one ledger",
            "start and retire nodes by hand, or set dataflow.ledgers to 1",
        )
    scaling = place.recipe.resources.scaling
    if dry_run:
        scaling = scaling.model_copy(update={"dry_run": True})
    client = DataflowClient(Client(place.url, place.token, peer="dataflow"))
    executor = build_executor(scaling, place.home)
    try:
        yield Maintainer(
            ServiceRun(client),
            executor,
            Book(place.folder.root),
            scaling,
            start_timeout=place.recipe.runtime.start_timeout,
            workers=place.workers,
            follow=follow,
            say=say,
        )
    finally:
        await executor.close()
        await client.close()


def maintainer_role(
    folder: RunFolder, *, dry_run: bool = False, say: Callable[[Line], None] = lambda line: None
) -> int:
    """Until the run has ended."""

    async def main() -> None:
        async with maintainer(await place_of(folder), dry_run=dry_run, say=say) as made:
            await made.run()

    prepare()
    with folder.locked("maintainer", PREDECESSOR_WAIT):
        return run_until_signal(main())


async def end_nodes(folder: RunFolder) -> None:
    """Stop the nodes that maintainers of this run have started, once it has ended and no maintainer runs.
    Those that a scheduler runs elsewhere are ended through its command. RunError when some would not go."""
    if not (folder.root / "maintainer-nodes.json").is_file() and folder.recipe.resources.scaling.executor != "ray":
        return
    scaling, url = folder.recipe.resources.scaling, folder.endpoint("dataflow")
    if url is None:
        return
    executor = build_executor(scaling, Place(folder, folder.recipe, url, folder.token).home)
    try:
        async with asyncio.timeout(_ENDING):
            # Together: a node that drains takes seconds.
            ends = await asyncio.gather(
                *(executor.stop(node) for node in await executor.nodes()), return_exceptions=True
            )
    except TimeoutError:
        raise RunError(f"some nodes of {folder.root} had not ended after {_ENDING:.0f} s", "see its logs") from None
    finally:
        await executor.close()
    for error in ends:
        if isinstance(error, BaseException):
            raise error


def _environment(recipe: Recipe, token: str) -> dict[str, str]:
    """Return the environment of a local node. It does not hold the parent's pid, because the node outlives its
    parent."""
    environment = child_environment(recipe.runtime.threads)
    return {name: value for name, value in environment.items() if name != "RILLFLOW_PARENT"} | {"RILLFLOW_TOKEN": token}


def _token_file(root: Path, token: str) -> Path:
    """A file with the node's token alone, which only its owner may read: for commands that start nodes elsewhere."""
    path = root / "token"
    with disk_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(token + "\n")
    return path

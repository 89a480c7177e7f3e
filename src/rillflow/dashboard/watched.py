"""A run that the dashboard watches: its folder, with the readers that follow its files, and its live service.

Nothing here writes to the folder. A folder of any state will do: new, running, killed, finished, or of another kind of
run. A missing or torn file shows as an empty panel, never as an error of the others.

The service is asked only for a browser's request, with a reader's token. An answer is reused for a second, and a
service that does not answer is not asked again for a few, so that many tabs cost a run no more than one. The connection
is kept between answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.ledgers import connect
from rillflow.config.load import parse
from rillflow.config.secrets import masked
from rillflow.dashboard.readers import Curves, Lanes
from rillflow.dataflow.balance import joined
from rillflow.dataflow.ledger.database import Snapshot, snapshot
from rillflow.errors import ConfigError, RillflowError, RunError, WireError
from rillflow.observe.advisories import FactReader
from rillflow.runtime.folder import RunFolder
from rillflow.storage import read_json
from rillflow.storage.spans import FOLDER as TIMELINE
from rillflow.storage.trajectory_format import FILE as TRAJECTORIES
from rillflow.types import NodeInfo, RetireNode, Status
from rillflow.types.balance import Balance
from rillflow.weights.manifest import HEAD

Found = TypeVar("Found")
LivePart = Literal["status", "nodes", "balance"]  # of the answers of a run's service
# What a view is made from. A view whose sources have not changed need not be made again.
Source = Literal["state", "metrics", "timeline", "ledger", "trajectories", "logs", "weights", "maintainer"]


@dataclass(frozen=True)
class Live:
    """The answers of a running run's dataflow service."""

    status: Status
    nodes: list[NodeInfo]
    balance: Balance


class WatchedRun:
    """Its readers are used by one thread at a time."""

    def __init__(self, folder: RunFolder, name: str, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.name = name
        self.now = clock
        self.recipe = _recipe(folder.root)
        self.curves = Curves(folder.metrics, self.first_policy)
        self.lanes = Lanes(folder.root)
        self.facts = FactReader(folder)

    @property
    def policies(self) -> list[str]:
        """In the order of the recipe; a supervised run has none."""
        return list(self.recipe.get("policies") or {})

    @property
    def first_policy(self) -> str:
        return next(iter(self.policies), "model")

    @property
    def started(self) -> float:
        with suppress(OSError, ValueError, KeyError, RillflowError):
            return float(read_json(self.folder.root / "run.json")["started"])
        return 0.0

    def state(self) -> dict[str, Any]:
        """The state that the run's supervisor has written; `unknown` where that is not whole."""
        try:
            return self.folder.state()
        except (OSError, ValueError, RillflowError):
            return {"state": "unknown", "reason": "state.json cannot be read", "time": self.started}

    @property
    def running(self) -> bool:
        return bool(self.state()["state"] == "running")

    def ledger(self, ask: Callable[[Snapshot], Found], default: Found) -> Found:
        """Return the answer of `ask` from the ledger; `default` before the ledger exists."""
        if not self.folder.ledger.is_file():
            return default
        with snapshot(self.folder.ledger) as reads:
            return ask(reads)

    def ledgers(self, ask: Callable[[Snapshot], Found]) -> list[Found]:
        """Return the answer of `ask` from every ledger of the run that exists, the first one's first."""
        found = []
        for path in self.folder.ledgers:
            if path.is_file():
                with snapshot(path) as reads:
                    found.append(ask(reads))
        return found

    def stamp(self, sources: Sequence[Source]) -> list[tuple[int, int]]:
        """Return the size and time of change of every file of these sources."""
        return [_stamp(path) for source in sources for path in self._files(source)]

    def _files(self, source: Source) -> Iterator[Path]:
        root = self.folder.root
        match source:
            case "state":
                yield root / "state.json"
            case "metrics":
                yield self.folder.metrics
            case "ledger" | "trajectories":
                for database in self.folder.ledgers if source == "ledger" else [root / TRAJECTORIES]:
                    yield from (database, database.with_name(f"{database.name}-wal"))
            case "timeline" | "logs":
                yield from sorted((root / (TIMELINE if source == "timeline" else "logs")).glob("*"))
            case "weights":
                yield from (self.folder.weights(policy) / HEAD for policy in self.policies)
            case "maintainer":
                yield from (root / "maintainer.jsonl", self.folder.workers.path)

    def lines(self, name: str, most: int) -> list[dict[str, Any]]:
        """The last whole lines of a JSON-lines file of the run."""
        found = []
        for line in tail(self.folder.root / name, most * 1000).splitlines()[-most:]:
            with suppress(msgspec.MsgspecError):
                value = msgspec.json.decode(line)
                if isinstance(value, dict):
                    found.append(value)
        return found


def watch(paths: list[Path]) -> list[WatchedRun]:
    """The runs in these folders, under the names of the folders, which are numbered where two are called alike."""
    runs: list[WatchedRun] = []
    for path in paths:
        folder = RunFolder.open(path)
        if any(run.folder.root == folder.root for run in runs):
            raise ConfigError(f"{path} is given twice", "name every run once")
        known, name, number = {run.name for run in runs}, folder.root.name, 2
        while name in known:
            name, number = f"{folder.root.name}-{number}", number + 1
        runs.append(WatchedRun(folder, name))
    return runs


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return (found.st_size, found.st_mtime_ns) if found.st_size else (0, 0)  # readers of a ledger make an empty log


def tail(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a file, from the first whole line of them; empty if the file does not exist."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(end - size, 0))
            data = file.read(size)
    except FileNotFoundError:
        return b""
    return data if end <= size else data[data.find(b"\n") + 1 :]


def _recipe(root: Path) -> dict[str, Any]:
    """Return the resolved recipe in plain values, without its secrets: of a run, of a supervised one, or of a version
    with other fields."""
    try:
        recipe: dict[str, Any] = masked(parse(root / "recipe.yaml"))
    except ConfigError as error:
        raise RunError(error.message, "restore it from a copy") from error
    return recipe


# ---------------------------------------------------------------- the live service


log = logging.getLogger(__name__)

FRESH = 1.0  # seconds for which an answer is used
_REST = 3.0  # seconds after a service has not answered
_PATIENCE = 2.0


class LiveRun:
    """The service of one run. `token` is the reader's; what the operator asks for carries the operator's own."""

    def __init__(self, run: WatchedRun, token: str) -> None:
        self._run = run
        self._token = token
        self._asking = asyncio.Lock()
        self._answer: Live | None = None
        self._until = 0.0
        self._client: DataflowClient | None = None
        self._url = ""

    async def now(self) -> Live | None:
        """The latest answer; None where the run is not running or does not answer."""
        async with self._asking:
            if time.monotonic() >= self._until:
                self._answer = await self._ask()
                self._until = time.monotonic() + (FRESH if self._answer is not None else _REST)
            return self._answer

    async def _ask(self) -> Live | None:
        url = self._run.folder.address if self._run.running else None
        if url is None:
            return None
        if self._client is None or url != self._url:
            await self.close()
            self._client, self._url = connect(url, self._token), url
        try:
            status = await self._client.status(_PATIENCE)
            nodes = await self._client.nodes(_PATIENCE)
            balance = joined((await self._client.balance(_PATIENCE)).ledgers)
        except WireError as error:
            log.info("%s: %s", self._run.name, error)
            await self.close()
            return None
        return Live(status, nodes.nodes, balance)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def stop(self, operator: str) -> None:
        """End the run; outstanding work stays in its ledger."""
        client = self._operating(operator)
        try:
            await client.stop("stopped from the dashboard", _PATIENCE)
        finally:
            await client.close()

    async def retire(self, operator: str, ask: RetireNode) -> None:
        client = self._operating(operator)
        try:
            await client.retire(ask, _PATIENCE)
        finally:
            await client.close()

    def _operating(self, operator: str) -> DataflowClient:
        url = self._run.folder.address
        if url is None or not self._run.running:
            raise WireError(f"{self._run.name} does not run", "only a running run takes commands")
        return connect(url, operator)

"""`rillflow tags`: show the workers of a run with their tags, and change these while the run goes on. `rillflow
maintain`: the loop that keeps their number, or the MCP server that an agent maintains a run with.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rillflow.cli.status import to_join
from rillflow.clients.joining import token_of
from rillflow.clients.ledgers import connect
from rillflow.errors import ConfigError, WireError
from rillflow.resources.maintainer.pool import Line
from rillflow.resources.placement import NONE, hosted_node, node_of, retagged
from rillflow.resources.workers import Worker, find, measure_apart, remeasured, with_rooflines
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.maintaining import maintainer, maintainer_role, place_at, place_of
from rillflow.runtime.process import prepare, run_until_signal
from rillflow.runtime.roles import PREDECESSOR_WAIT
from rillflow.types import NodeInfo
from rillflow.wire import Client
from rillflow.wire.routing import Common

# ---------------------------------------------------------------- tags


_PATIENCE = 2.0  # seconds; a live service answers in milliseconds


def tags_command(folder: RunFolder, worker: str | None, words: Sequence[str], *, measure: bool, as_json: bool) -> None:
    """Change what was asked for, then show the workers as they are."""
    recipe, file = folder.recipe, folder.workers
    if not file.path.is_file():
        file.prepare(recipe)
    if worker is not None and words:
        file.change(lambda workers: retagged(recipe, workers, worker, words))
    if measure:
        known = remeasured(recipe, file.read(), measure_apart)
        file.change(lambda workers: with_rooflines(workers, known))
    workers = file.read()
    shown = [find(workers, worker)] if worker is not None else workers
    seen = look(folder)
    views = [view(one, seen) for one in shown]
    if as_json:
        print(json.dumps({"running": seen is not None, "workers": msgspec.to_builtins(views)}, indent=2))
        return
    console = Console()
    console.print(_table(views))
    if seen is None:
        console.print("no dataflow service answers: the tags count when the run goes on", style="dim")


@dataclass(frozen=True)
class Seen:
    """The state that the processes of a run report."""

    nodes: Mapping[str, NodeInfo]
    trainers: frozenset[str]


class View(msgspec.Struct, frozen=True):
    """A row of the table. `active` is the tag of what it does now; None while it does nothing."""

    name: str
    tags: list[str]
    active: str | None
    priority: float | None
    tflops: float | None
    bandwidth: float | None
    process: str
    rank: int | None
    state: str


def view(worker: Worker, seen: Seen | None) -> View:
    active, state = _state(worker, seen)
    numbers = {name: getattr(worker, name) for name in ("name", "priority", "tflops", "bandwidth", "process", "rank")}
    return View(tags=sorted(worker.tags), active=active, state=state, **numbers)


def _state(worker: Worker, seen: Seen | None) -> tuple[str | None, str]:
    if worker.lost:
        return None, "lost"
    if seen is None:
        return None, "not running" if worker.process else "spare"
    if not worker.process:
        node = seen.nodes.get(node_of(worker.name))
        return (node.active, "leaving") if node is not None and node.state == "healthy" else (None, "spare")
    if worker.rank is not None:
        return _training(worker, worker.rank, seen)
    return _playing(seen.nodes.get(worker.process))


def _training(worker: Worker, rank: int, seen: Seen) -> tuple[str | None, str]:
    """Return whether a trainer's worker trains: a trainer that hosts a node reports it there; any other always
    trains."""
    if worker.process not in seen.trainers:
        return None, "starting"
    hosted = seen.nodes.get(hosted_node(rank)) if "rollout" in worker.tags else None
    if hosted is None or hosted.state != "healthy":
        return "train", "up"
    return hosted.active, "up"


def _playing(node: NodeInfo | None) -> tuple[str | None, str]:
    if node is None:
        return None, "starting"
    if node.state != "healthy":
        return None, node.state
    return node.active, "leaving" if node.leaving else "up"


def _table(views: Sequence[View]) -> Table:
    table = Table()
    for heading in ("worker", "tags", "active", "train priority", "process", "state"):
        table.add_column(heading, overflow="fold")  # names are to be copied
    for one in views:
        priority = "" if one.priority is None else f"{one.priority:.4g}"
        process = one.process if one.rank is None else f"{one.process}, rank {one.rank}"
        table.add_row(one.name, ",".join(one.tags) or NONE, one.active or "", priority, process, one.state)
    return table


def look(folder: RunFolder) -> Seen | None:
    """Return the reported state, or None if no dataflow service answers."""
    url = folder.address
    if url is None:
        return None
    try:
        return asyncio.run(_look(folder, url))
    except WireError:
        return None


async def _look(folder: RunFolder, url: str) -> Seen:
    client = connect(url, folder.token)
    try:
        nodes = (await client.nodes(_PATIENCE)).nodes
    finally:
        await client.close()
    trainers = [f"trainer-{policy}" for policy in folder.recipe.policies]
    up = await asyncio.gather(*(_answers(folder, name) for name in trainers))
    alive = frozenset(name for name, answers in zip(trainers, up, strict=True) if answers)
    return Seen({node.name: node for node in nodes}, alive)


async def _answers(folder: RunFolder, process: str) -> bool:
    url = folder.endpoint(process)
    if url is None:
        return False
    client = Client(url, folder.token, peer=process)
    try:
        await client.call(Common.health, None, _PATIENCE)
    except WireError:
        return False
    finally:
        await client.close()
    return True


# ---------------------------------------------------------------- the maintainer


_COLOURS = {"grow": "yellow", "shrink": "yellow", "failed": "red", "died": "red", "refused": "red", "joined": "green"}


def maintain(
    folder: Path | None,
    *,
    join: str | None = None,
    state: Path | None = None,
    token_file: Path | None = None,
    dry_run: bool = False,
    mcp: bool = False,
    port: int | None = None,
) -> int:
    """The exit code: 0 once the run has ended."""
    if (folder is None) == (join is None):
        raise ConfigError("give a run folder, or --join URL", "rillflow maintain runs/…; rillflow maintain --join URL")
    if port is not None and not mcp:
        raise ConfigError("--port is where an MCP server listens", "give --mcp with it")
    opened = to_join(folder) if folder is not None else None
    if opened is not None and not mcp:
        return maintainer_role(opened, dry_run=dry_run, say=_printer(dry_run))
    home = opened or RunFolder(_state_folder(state, str(join)).resolve())
    token = token_of(token_file) if opened is None else ""

    async def main() -> None:
        place = await (place_of(opened) if opened is not None else place_at(str(join), token, home.root))
        # On stdio the client would read printed lines as answers.
        say = _printer(dry_run) if not mcp else lambda line: None
        async with maintainer(place, dry_run=dry_run, follow=not mcp, say=say) as made:
            if not mcp:
                await made.run()
            elif port is None:
                from rillflow.resources.mcp import serve_stdio

                await serve_stdio(made)
            else:
                from rillflow.resources.mcp import serve_http

                await serve_http(made, place.token, port, lambda url: _listens(home, url))

    prepare()
    with home.locked("maintainer", PREDECESSOR_WAIT):
        return run_until_signal(main())


def _state_folder(state: Path | None, url: str) -> Path:
    if state is None:
        raise ConfigError(
            "a maintainer that joins by URL needs a folder to remember what it has started",
            f"rillflow maintain --join {url} --state DIR",
        )
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    return state


def _listens(home: RunFolder, url: str) -> None:
    (home.root / "endpoints").mkdir(exist_ok=True)
    home.publish_endpoint("maintainer", url)
    Console(stderr=True).print(f"the maintainer's MCP server: {url} (Authorization: Bearer TOKEN)", soft_wrap=True)


def _printer(dry_run: bool) -> Callable[[Line], None]:
    """Return a function that prints decisions on a terminal; elsewhere the log has them."""
    console = Console(file=sys.stdout, quiet=not (dry_run or sys.stdout.isatty()))

    def say(line: Line) -> None:
        report = f"report {line.version}: " if line.version >= 0 else ""
        nodes = f" [{', '.join(line.nodes)}]" if line.nodes else ""
        dry = "would " if line.dry_run and line.action in ("grow", "shrink") else ""
        action = (f"{dry}{line.action}", _COLOURS.get(line.action, ""))
        console.print(Text.assemble(report, action, f": {line.why}{nodes}"), soft_wrap=True, highlight=False)

    return say

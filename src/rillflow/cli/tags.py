"""`rillflow tags`: show the workers of a run with their tags, and change these while the run goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from rillflow.clients.ledgers import connect
from rillflow.errors import WireError
from rillflow.resources.placement import NONE, hosted_node, node_of, retagged
from rillflow.resources.roofline import measure_apart
from rillflow.resources.workers import Worker, find, remeasured, with_rooflines
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeInfo
from rillflow.wire import Client
from rillflow.wire.routing import Common

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

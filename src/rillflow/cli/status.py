"""`rillflow status` and `rillflow top`: runs as they are now, by their services and their folders. `rillflow nodes` and
`rillflow retire`: list the nodes of a run, retire one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.joining import token_of
from rillflow.clients.ledgers import connect
from rillflow.errors import ConfigError, DeadlineExceeded, RillflowError, RunError, Unavailable
from rillflow.observe.run_view import RunReport, as_json, report_of, report_view, reports_table, where_and_next
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeInfo, NodeList, RetireNode, Status

_PATIENCE = 2.0  # seconds; a live service answers in milliseconds
_MOST = 50  # runs that `top` shows: the newest


def print_status(folder: RunFolder, *, json_wanted: bool) -> None:
    (report,) = asyncio.run(look([folder]))
    if json_wanted:
        print(json.dumps(as_json(report), indent=2))
        return
    console = Console()
    console.print(report_view(report))
    console.print(Text(where_and_next(report), "dim"), soft_wrap=True)


def top(path: Path | None, *, every: float, json_wanted: bool) -> None:
    """Show one run, or all below a folder, refreshed until Ctrl-C; once if the output is not a terminal."""
    folders = runs_in(path or Path("runs"))
    console = Console()
    if json_wanted:
        print(json.dumps([as_json(report) for report in asyncio.run(look(folders))], indent=2))
    elif not console.is_terminal:
        console.print(_view(asyncio.run(look(folders)), alone=_is_run(path)))
    else:
        asyncio.run(_follow(path, console, every))


async def _follow(path: Path | None, console: Console, every: float) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            reports = await look(runs_in(path or Path("runs")))
            live.update(_view(reports, alone=_is_run(path)), refresh=True)
            await asyncio.sleep(every)


def _view(reports: Sequence[RunReport], *, alone: bool) -> RenderableType:
    if alone:
        return Group(report_view(reports[0]), Text(where_and_next(reports[0]), "dim", overflow="fold"))
    return reports_table(list(reports)) if reports else Text("no runs yet")


def _is_run(path: Path | None) -> bool:
    return path is not None and (path / "run.json").is_file()


def runs_in(path: Path) -> list[RunFolder]:
    """Return the run that a folder is, or the newest of those in it, the newest first."""
    if _is_run(path):
        return [RunFolder.open(path)]
    if not path.is_dir():
        raise RunError(f"{path} does not exist", "give a run folder, or one with runs, such as `rillflow run` made")
    found = sorted(path.glob("*/run.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [RunFolder.open(file.parent) for file in found[:_MOST] if (file.parent / "recipe.yaml").is_file()]


async def look(folders: Sequence[RunFolder]) -> list[RunReport]:
    """Return the reports of runs; those whose folder cannot be read are left out, unless it is the only one."""
    statuses = await asyncio.gather(*(ask(folder) for folder in folders))
    now, reports = time.time(), []
    for folder, status in zip(folders, statuses, strict=True):
        try:
            reports.append(report_of(folder, status, now))
        except RillflowError:
            if len(folders) == 1:
                raise
    return reports


async def ask(folder: RunFolder) -> Status | None:
    """Return the status from a run's service; None if none answers."""
    url = folder.address
    if url is None:
        return None
    client = connect(url, folder.token_of("reader"))
    try:
        return await client.status(_PATIENCE)
    except RillflowError:
        return None
    finally:
        await client.close()


# ---------------------------------------------------------------- nodes


Reply = TypeVar("Reply")
_CALL_PATIENCE = 5.0


def call(
    folder: Path | None, url: str | None, token_file: Path | None, ask: Callable[[DataflowClient], Awaitable[Reply]]
) -> Reply:
    """Ask the service of a run, which is named by its folder or by its URL; RunError where none answers."""
    where, token = _service(folder, url, token_file)

    async def asked() -> Reply:
        client = connect(where, token)
        try:
            return await ask(client)
        finally:
            await client.close()

    try:
        return asyncio.run(asked())
    except (Unavailable, DeadlineExceeded) as error:
        if folder is None:
            raise RunError(f"no run answers at {where}: {error.message}", "check --join, and that it runs") from error
        raise no_service(RunFolder.open(folder)) from error


def no_service(folder: RunFolder) -> RunError:
    """Return what to say of a run whose service does not answer."""
    state = folder.state()
    why = f" ({state['reason']})" if state["reason"] else ""
    if state["state"] == "finished":
        return RunError(
            f"{folder.root} has finished{why}: none of its processes run any more",
            f"`rillflow status {folder.root}` shows what it came to",
        )
    if state["state"] in ("stopped", "failed"):
        return RunError(f"{folder.root} has {state['state']}{why}", f"`rillflow resume {folder.root}` goes on with it")
    if state["state"] == "new":
        return RunError(f"{folder.root} has not been started", f"start it with `rillflow resume {folder.root}`")
    if folder.is_running():
        return RunError(f"{folder.root} does not answer yet", "it starts, or is busy: try again in a moment")
    return RunError(
        f"{folder.root} does not answer: its processes have died, or run on another machine",
        f"`rillflow resume {folder.root}` goes on with it; --join URL asks a run elsewhere",
    )


def to_join(path: Path) -> RunFolder:
    """Open the folder of a run that a process is started for by hand; RunError where it has finished, unless its
    service answers."""
    folder = RunFolder.open(path)
    if folder.state()["state"] == "finished" and asyncio.run(ask(folder)) is None:
        raise no_service(folder)
    return folder


def _service(folder: Path | None, url: str | None, token_file: Path | None) -> tuple[str, str]:
    if (folder is None) == (url is None):
        raise ConfigError("give a run folder, or --join URL", "rillflow nodes runs/…; rillflow nodes --join http://…")
    if url is not None:
        return url, token_of(token_file)
    opened = RunFolder.open(folder or "")
    found = opened.address
    if found is None:
        raise no_service(opened)
    return found, opened.token


def print_nodes(folder: Path | None, url: str | None, token_file: Path | None, *, as_json: bool) -> None:
    async def listed(client: DataflowClient) -> tuple[NodeList, Status]:
        return await client.nodes(_CALL_PATIENCE), await client.status(_CALL_PATIENCE)

    nodes, status = call(folder, url, token_file, listed)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(nodes), indent=2).decode())
        return
    Console().print(nodes_table(nodes, status.versions))


def nodes_table(nodes: NodeList, heads: dict[str, int]) -> Table:
    table = Table("node", "state", "does", "behind", "holds", "s/episode", "samples/s")
    for node in nodes.nodes:
        table.add_row(
            node.name,
            "leaving" if node.leaving and node.state == "healthy" else node.state,
            node.active if node.state == "healthy" else "",
            _behind(node, heads),
            f"{node.held} of {node.capacity}",
            "" if node.pace is None else f"{node.pace:.2f}",
            f"{node.throughput:.2f}",
        )
    return table


def _behind(node: NodeInfo, heads: dict[str, int]) -> str:
    """By how many versions, of every policy where they differ."""
    ages = {policy: head - node.versions[policy] for policy, head in heads.items() if policy in node.versions}
    if len(set(ages.values())) <= 1:
        return str(next(iter(ages.values()), ""))
    return ", ".join(f"{policy} {age}" for policy, age in ages.items())


def retire(folder: Path | None, url: str | None, token_file: Path | None, node: str, drain: float) -> None:
    call(folder, url, token_file, lambda client: client.retire(RetireNode(node=node, drain=drain), _CALL_PATIENCE))
    Console().print(f"{node} gets no more tasks and leaves within {drain:.0f} s", highlight=False, soft_wrap=True)

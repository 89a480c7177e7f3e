"""`rillflow status` and `rillflow top`: runs as they are now, by their services and their folders."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rillflow.clients.ledgers import connect
from rillflow.errors import RillflowError, RunError
from rillflow.observe.run_report import RunReport, as_json, report_of, report_view, reports_table, where_and_next
from rillflow.runtime.folder import RunFolder
from rillflow.types import Status

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

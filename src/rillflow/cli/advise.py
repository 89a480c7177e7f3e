"""`rillflow advise`: what is wrong with a run, live or finished, and what to do next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from rillflow.cli.app import RunArgument, app, clear_errors
from rillflow.clients.dataflow import DataflowClient
from rillflow.errors import WireError
from rillflow.observe.advisories import Advisory, Facts
from rillflow.observe.advisories import advise as advise_on
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeInfo, Status
from rillflow.wire import Client

_PATIENCE = 2.0  # seconds; a service that is there answers in milliseconds
_STYLES = {"problem": "bold red", "warning": "bold yellow", "hint": "bold cyan"}


@app.command()
def advise(
    folder: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advisories as JSON")] = False,
) -> None:
    """Say what is wrong with a run, with the numbers behind it, and what to do; of a healthy run, what to tune."""
    with clear_errors():
        facts = facts_of(RunFolder.open(folder))
        found = advise_on(facts)
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            _print(found, facts)


def facts_of(folder: RunFolder) -> Facts:
    """Return what the run's folder says, and its service where it answers."""
    status, nodes = asyncio.run(_ask(folder)) if folder.state()["state"] == "running" else (None, None)
    return Facts.of_run(folder, status, nodes, time.time())


async def _ask(folder: RunFolder) -> tuple[Status | None, Sequence[NodeInfo] | None]:
    url = folder.endpoint("dataflow")
    if url is None:
        return None, None
    client = DataflowClient(Client(url, folder.token_of("reader"), peer="dataflow"))
    try:
        return await client.status(_PATIENCE), (await client.nodes(_PATIENCE)).nodes
    except (WireError, msgspec.ValidationError):
        return None, None  # it has ended, and perhaps another program listens where it did
    finally:
        await client.close()


def _print(found: Sequence[Advisory], facts: Facts) -> None:
    console = Console()
    for number, advisory in enumerate(found):
        if number:
            console.print()
        heading = (f"{advisory.severity}: ", _STYLES[advisory.severity])
        console.print(Text.assemble(heading, (advisory.title, "bold")), soft_wrap=True)
        if advisory.why:
            console.print(Text(f"  because: {_indented(advisory.why)}"), soft_wrap=True)
        console.print(Text(f"  what to do: {advisory.what_to_do}"), soft_wrap=True)
    if not found:
        steps = sum(len(each) for each in facts.policies.values())
        console.print(f"nothing to say: {facts.episodes} episodes and {steps} steps look healthy", highlight=False)
    for what in facts.unread:
        console.print(f"not read: {what}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _indented(text: str) -> str:
    return "\n    ".join(text.splitlines())

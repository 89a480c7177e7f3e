"""`rillflow nodes` and `rillflow retire`: list the nodes of a run, retire one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from rillflow.cli.status import ask
from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.joining import token_of
from rillflow.clients.ledgers import connect
from rillflow.errors import ConfigError, DeadlineExceeded, RunError, Unavailable
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeInfo, NodeList, RetireNode, Status

Reply = TypeVar("Reply")
_PATIENCE = 5.0


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
        return await client.nodes(_PATIENCE), await client.status(_PATIENCE)

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
    call(folder, url, token_file, lambda client: client.retire(RetireNode(node=node, drain=drain), _PATIENCE))
    Console().print(f"{node} gets no more tasks and leaves within {drain:.0f} s", highlight=False, soft_wrap=True)

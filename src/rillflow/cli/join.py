"""`rillflow nodes` and `rillflow retire`: who plays for a run, and how one is sent away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.joining import token_of
from rillflow.errors import ConfigError, RunError, WireError
from rillflow.runtime.folder import RunFolder
from rillflow.types import NodeInfo, NodeList, RetireNode, Status
from rillflow.wire import Client

Reply = TypeVar("Reply")
_PATIENCE = 5.0


def call(
    folder: Path | None, url: str | None, token_file: Path | None, ask: Callable[[DataflowClient], Awaitable[Reply]]
) -> Reply:
    """Ask the service of a run, which is named by its folder or by its URL."""
    where, token = _service(folder, url, token_file)

    async def asked() -> Reply:
        client = DataflowClient(Client(where, token, peer="dataflow"))
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(asked())


def _service(folder: Path | None, url: str | None, token_file: Path | None) -> tuple[str, str]:
    if (folder is None) == (url is None):
        raise ConfigError("give a run folder, or --join URL", "rillflow nodes runs/…; rillflow nodes --join http://…")
    if url is not None:
        return url, token_of(token_file)
    opened = RunFolder.open(folder or "")
    found = opened.endpoint("dataflow")
    if found is None:
        raise RunError(f"{opened.root} has not been started", "start it with `rillflow resume`")
    return found, opened.token


def print_nodes(folder: Path | None, url: str | None, token_file: Path | None, *, as_json: bool) -> None:
    async def ask(client: DataflowClient) -> tuple[NodeList, Status]:
        return await client.nodes(_PATIENCE), await client.status(_PATIENCE)

    try:
        nodes, status = call(folder, url, token_file, ask)
    except WireError as error:
        raise RunError(f"the run does not answer: {error.message}", "is it running?") from error
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

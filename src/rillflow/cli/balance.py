"""`rillflow balance`: the report of a live run, or, if no service answers, of its ledger."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from rich.console import Console

from rillflow.clients.ledgers import connect
from rillflow.dataflow.balance import Balance
from rillflow.dataflow.balance_ledger import read_balance
from rillflow.errors import WireError
from rillflow.observe.balance import balance_view
from rillflow.runtime.folder import RunFolder

_PATIENCE = 2.0  # seconds; a live service answers in milliseconds


def print_balance(folder: RunFolder, *, as_json: bool) -> None:
    balance, live = find_balance(folder)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(balance), indent=2).decode())
        return
    console = Console()
    console.print(balance_view(balance))
    if not live:
        console.print("no dataflow service answers: this is what the ledger has", style="dim")


def find_balance(folder: RunFolder) -> tuple[Balance, bool]:
    """Return the balance, and whether it comes from a live service."""
    url = folder.address
    if url is not None:
        try:
            return msgspec.convert(asyncio.run(_ask(url, folder.token)), Balance), True
        except (WireError, msgspec.ValidationError):
            pass  # the service has ended, and perhaps another program listens where it did
    return read_balance(folder.ledger, folder.recipe.policy), False


async def _ask(url: str, token: str) -> dict[str, Any]:
    client = connect(url, token)
    try:
        return await client.balance(_PATIENCE)
    finally:
        await client.close()

"""`rillflow advise`: the problems of a run, live or finished, and what to do next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from rillflow.cli.status import ask
from rillflow.observe.advisories import Advisory, FactReader, Facts, advise
from rillflow.runtime.folder import RunFolder

_STYLES = {"problem": "bold red", "warning": "bold yellow", "hint": "bold cyan"}


def print_advice(folder: RunFolder, *, as_json: bool) -> None:
    facts = facts_of(folder)
    found = advise(facts)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _print(found, facts)


def facts_of(folder: RunFolder) -> Facts:
    """Return what the run's folder says, and its service where it answers."""
    status = asyncio.run(ask(folder)) if folder.state()["state"] == "running" else None
    return FactReader(folder).read(status, now=time.time())


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

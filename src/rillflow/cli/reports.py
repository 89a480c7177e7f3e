"""The output of `rillflow audit`, `rillflow advise` and `rillflow timeline`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rillflow.cli.status import ask
from rillflow.dataflow.audit import AuditReport
from rillflow.errors import RunError
from rillflow.observe.advisories import Advisory, FactReader, Facts, advise
from rillflow.observe.timeline import COLOURS, draw, report, timeline, whole
from rillflow.runtime.folder import RunFolder


def print_report(report: AuditReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return
    console = Console()
    table = Table("identity", "left", "right", "holds", title="Audit", title_justify="left")
    for identity in report.identities:
        table.add_row(identity.name, str(identity.left), str(identity.right), "yes" if identity.ok else "[red]NO[/]")
    console.print(table)
    for name, count in sorted(report.counts.items()):
        console.print(f"  {name}: {count}", highlight=False)
    console.print("[green]balanced[/]" if report.balanced else "[bold red]NOT balanced[/]")


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


def draw_timeline(folder: RunFolder) -> None:
    """Draw the timeline of a run, if it has recorded any spans."""
    with suppress(RunError):
        draw(timeline(folder.root), folder.root / "timeline.png", folder.recipe.name)


def show_timeline(folder: RunFolder, png: Path | None, *, as_json: bool) -> None:
    workers = timeline(folder.root)
    window = whole(workers)
    found = report(workers, window)
    if png is not None:
        draw(workers, png, folder.recipe.name)
    if as_json:
        print(json.dumps({"begin": window.begin, "end": window.end, "workers": found}, indent=2))
        return
    table = Table("worker", *COLOURS, title=f"{window.seconds:.0f} s, by what was done", title_justify="left")
    for worker, spent in found.items():
        table.add_row(worker, *(f"{spent[state]:.1%}" for state in COLOURS))
    console = Console()
    console.print(table)
    if png is not None:
        console.print(f"drawn into {png}", highlight=False, soft_wrap=True)

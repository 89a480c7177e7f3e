"""The output of `rillflow audit`, `advise`, `timeline`, `balance` and `trace`.

The balance is that of a live run or, if no service answers, of its ledger. A trace is that of a run, or the life of one
of its episodes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rillflow.cli.status import ask
from rillflow.clients.ledgers import connect
from rillflow.dataflow.audit import AuditReport
from rillflow.dataflow.balance import joined
from rillflow.dataflow.balance_ledger import read_balance
from rillflow.dataflow.episode_history import life_of, read_histories
from rillflow.dataflow.ledger.database import snapshot
from rillflow.errors import RunError, WireError
from rillflow.observe.advisories import Advisory, FactReader, Facts, advise
from rillflow.observe.timeline import COLOURS, draw, report, timeline, trace, whole
from rillflow.runtime.folder import RunFolder
from rillflow.storage import write_atomic
from rillflow.storage.spans import read_spans
from rillflow.types.balance import Balance, Decision, Production, Report, Window
from rillflow.types.runs import ledger_of


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


# ---------------------------------------------------------------- balance: the three blocks, then a row per node


_COLOURS = {"grow": "yellow", "shrink": "yellow", "hold": "green", "healthy": "green", "suspect": "yellow"}
UNKNOWN = "–"


def balance_view(balance: Balance) -> RenderableType:
    """The last full window and the one that is under way."""
    current = _report(balance.current, "Balance since then" if balance.latest else "Balance, the first window so far")
    if balance.latest is None:
        return current
    return Group(_report(balance.latest, "Balance report"), Text(), current)


def _report(report: Report, title: str) -> RenderableType:
    blocks = Table.grid(padding=(0, 2))
    blocks.add_column(style="bold")
    blocks.add_row("window", _window(report.window))
    blocks.add_row("production", _production(report.production))
    blocks.add_row("decision", _decision(report.production.gpus, report.decision))
    heading = f"{title}: {report.policy}, versions {report.window.since} to {report.version}"
    return Group(Text(heading, style="bold underline"), blocks, _nodes(report))


def _window(window: Window) -> str:
    return (
        f"{window.wall_seconds:.0f} s, {window.eval_seconds:.0f} s of it evaluation; {window.steps} steps, "
        f"{window.counted} without an evaluation: {_number(window.step_seconds)} s each, "
        f"{_number(window.batch_wait_seconds)} s of it waiting; wait fraction {_share(window.wait_fraction)}"
    )


def _production(made: Production) -> str:
    return (
        f"{made.gpus} GPUs, {_number(made.throughput_per_gpu)} samples/s each; {made.produced} samples produced, "
        f"{made.entered} entered ({_share(made.accept_rate)}), {made.consumed} consumed, "
        f"{made.stale_skipped} stale ({_share(made.stale_rate)}); "
        f"produce/consume {_number(made.produce_consume_ratio)}"
    )


def _decision(gpus: int, decision: Decision) -> Text:
    change = "" if decision.delta == 0 else f" {gpus} to {decision.target} GPUs ({decision.delta:+d})"
    transfer = "; weights are being transferred" if decision.weight_transfer else ""
    return Text.assemble((decision.branch, _COLOURS[decision.branch]), change, transfer)


def _nodes(report: Report) -> Table:
    table = Table("node", "state")
    for name in ("GPUs", "produced", "accepted", "accept rate", "samples/s per GPU"):
        table.add_column(name, justify="right")
    for node in report.nodes:
        table.add_row(
            Text(node.id),
            Text(node.state, style=_COLOURS.get(node.state, "red")),
            str(node.gpus),
            str(node.produced),
            str(node.accepted),
            _share(node.accept_rate),
            _number(node.throughput_per_gpu),
        )
    return table


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


# ---------------------------------------------------------------- the balance of a live run, or of its ledgers


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
            return asyncio.run(_ask(url, folder.token)), True
        except WireError:
            pass  # the service has ended, and perhaps another program listens where it did
    return read_balance(folder.ledgers, folder.recipe.policy), False


async def _ask(url: str, token: str) -> Balance:
    client = connect(url, token)
    try:
        return joined((await client.balance(_PATIENCE)).ledgers)
    finally:
        await client.close()


# ---------------------------------------------------------------- traces


def write_trace(folder: RunFolder, path: Path, most: int) -> None:
    """Write the trace of a run, live or finished, and say where it is and what it leaves out."""
    history = read_histories(folder.ledgers, most)
    made = trace(read_spans(folder.root), history, _now(folder))
    write_atomic(path, json.dumps(made).encode())
    shown, episodes = len(history.episodes), history.episodes_in_all
    what = f"{shown} episodes" if shown == episodes else f"the newest {shown} of {episodes} episodes"
    console = Console(stderr=True)
    console.print(f"{path}: {what}; open it at https://ui.perfetto.dev", highlight=False, soft_wrap=True)


def print_life(folder: RunFolder, episode: str) -> None:
    ledgers = folder.ledgers
    with snapshot(ledgers[min(ledger_of(episode), len(ledgers) - 1)]) as reads:
        moments = life_of(reads, episode)
    table = Table("seconds", "what", title=f"Episode {episode}", title_justify="left")
    table.columns[0].justify = "right"
    for moment in moments:
        table.add_row(f"{moment.time - moments[0].time:.3f}", moment.what)
    Console().print(table)


def _now(folder: RunFolder) -> float:
    """When the run ended; of one that runs, this moment."""
    state = folder.state()
    return time.time() if state["state"] in ("new", "running") else float(state["time"])

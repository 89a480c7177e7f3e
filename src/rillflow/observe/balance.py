"""The balance report as people read it: the three blocks, then a row per node."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rillflow.dataflow.balance import Balance, Decision, Production, Report, Window

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

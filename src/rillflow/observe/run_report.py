"""One look at a run, live or ended: what `rillflow status` and `rillflow top` show.

A live run's numbers are its service's (`Status`); those of one that has ended are read from its folder. A run of
supervised training has no service: all that is known of it is in its folder.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from rich.table import Column, Table
from rich.text import Text

from rillflow.config.load import FIT, parse
from rillflow.errors import RillflowError
from rillflow.observe.metrics import MetricsReader, read_metrics
from rillflow.observe.progress import sparkline
from rillflow.observe.summary import failures, listed
from rillflow.runtime.folder import RunFolder
from rillflow.storage import read_json
from rillflow.types import Status

_CURVE = 24  # rewards that are drawn
_STYLES = {"running": "green", "starting": "yellow", "finished": "", "stopped": "yellow", "failed": "red"}
State = Literal["running", "starting", "finished", "stopped", "failed", "killed", "new"]


class RunReport(msgspec.Struct, frozen=True):
    """`state`: a run that is `killed` was running when its processes died. `seconds` are since its start, or until its
    end. `heldout` are the rewards of its evaluations. `live` is what its service says, None where none answers."""

    name: str
    folder: str
    state: State
    reason: str
    seconds: float
    steps: int
    total_steps: int
    reward: float | None
    rewards: list[float]
    heldout: list[float]
    failed: dict[str, int]
    dashboard: str | None
    live: Status | None


def report_of(folder: RunFolder, status: Status | None, now: float) -> RunReport:
    """Return the report of a run whose service says `status`, or does not answer."""
    raw = parse(folder.root / "recipe.yaml")
    state = folder.state()
    started = float(read_json(folder.root / "run.json")["started"])
    kind = _state(folder, state["state"], status)
    until = now if kind in ("running", "starting") else float(state.get("time", started))
    url = folder.endpoint("dashboard")
    rewards, heldout = ([], []) if FIT in raw else _rewards(folder)
    steps = len(rewards) if status is None else status.steps
    total = raw.get("trainer", {}).get("steps", 0) if FIT in raw else folder.recipe.policies[folder.recipe.policy]
    return RunReport(
        name=str(raw.get("name", folder.root.name)),
        folder=str(folder.root),
        state=kind,
        reason=state["reason"],
        seconds=max(0.0, until - started),
        steps=_fit_steps(folder) if FIT in raw else steps,
        total_steps=total if isinstance(total, int) else total.trainer.steps,
        reward=(rewards[-1] if rewards else None) if status is None else status.reward,
        rewards=rewards[-_CURVE:],
        heldout=heldout,
        failed=failures(_counts(folder) if status is None else status.counts),
        dashboard=None if status is None or url is None else folder.dashboard_url(url),
        live=status,
    )


def _state(folder: RunFolder, said: str, status: Status | None) -> State:
    if status is not None and status.phase != "ended":
        return "running"
    if said != "running":
        return "new" if said == "new" and not folder.is_running() else _known(said)
    return "starting" if folder.is_running() else "killed"


def _known(said: str) -> State:
    known: State = msgspec.convert(said, State)
    return known


def _rewards(folder: RunFolder) -> tuple[list[float], list[float]]:
    """Return the mean reward of the first policy's steps, and of the evaluations."""
    first = folder.recipe.policy
    metrics = read_metrics(folder.metrics, first)
    steps = [float(step["reward_mean"]) for step in metrics.of(first) if step.get("reward_mean") is not None]
    return steps, [float(done["reward"]) for done in metrics.evaluations if done["reward"] is not None]


def _fit_steps(folder: RunFolder) -> int:
    return sum("step" in line and "event" not in line for line in MetricsReader(folder.metrics).new())


def _counts(folder: RunFolder) -> dict[str, int]:
    path = folder.root / "summary.json"
    try:
        return dict(read_json(path).get("counts", {})) if path.is_file() else {}
    except RillflowError:
        return {}


# ---------------------------------------------------------------- what is shown


def where_and_next(report: RunReport) -> str:
    """Return where a run and its dashboard are, and how to go on with one that does not run: lines that must not be
    wrapped."""
    dashboard = "" if report.dashboard is None else f"dashboard: {report.dashboard}"
    return "\n".join(filter(None, (f"folder: {report.folder}", dashboard, what_to_do(report))))


def what_to_do(report: RunReport) -> str:
    if report.state in ("killed", "stopped", "failed"):
        return f"`rillflow resume {report.folder}` goes on where it was"
    return ""


def report_view(report: RunReport) -> Table:
    """Return one run, with all that is known of it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("run", Text(report.name, "bold"))
    reason = f" ({report.reason})" if report.reason else ""
    table.add_row("state", Text(f"{report.state}{reason}", _STYLES.get(report.state, "red")))
    table.add_row("step", f"{report.steps}/{report.total_steps}, {_time(report.seconds)}")
    table.add_row("reward", f"{_number(report.reward)}  {sparkline(report.rewards, _CURVE)}")
    if report.heldout:
        table.add_row("held-out reward", f"{report.heldout[-1]:.3f}, best {max(report.heldout):.3f}")
    if (live := report.live) is not None:
        table.add_row("samples/s", f"{live.samples_per_second:.1f}")
        table.add_row("staleness", f"{live.staleness:.2f}")
        table.add_row("trainer waits", f"{live.wait_fraction:.0%} of its time")
        table.add_row("nodes", str(live.nodes))
        for name, policy in live.policies.items() if len(live.policies) > 1 else ():
            told = f"step {policy.steps}/{policy.total_steps}, reward {_number(policy.reward)}"
            table.add_row(f"  {name}", f"{told}, {policy.ready} samples ready")
        table.add_row("prompts", listed({n: c for n, c in live.counts.items() if c and "." not in n}))
        for wait in live.waits:
            table.add_row("waits", Text(wait, "yellow"))
    if report.failed:
        table.add_row("failed episodes", Text(listed(report.failed), "red"))
    return table


def reports_table(reports: list[RunReport]) -> Table:
    """A row for each run, within 80 columns but for the names of their folders."""
    table = Table(
        Column("run", overflow="fold"), "state", "step", "reward", "held-out", "samples/s", "wait", "time", box=None
    )
    for report in reports:
        live = report.live
        table.add_row(
            report.folder.rpartition("/")[2],
            Text(report.state, _STYLES.get(report.state, "red")),
            f"{report.steps}/{report.total_steps}",
            _number(report.reward),
            _number(report.heldout[-1] if report.heldout else None),
            "" if live is None else f"{live.samples_per_second:.1f}",
            "" if live is None else f"{live.wait_fraction:.0%}",
            _time(report.seconds),
        )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_json(report: RunReport) -> dict[str, Any]:
    return dict(msgspec.to_builtins(report)) | {"what_to_do": what_to_do(report)}

"""Runs on a terminal: the live view of `rillflow run`, and the report that `rillflow status` and `rillflow top` show.

Elsewhere than on a terminal, a plain line is printed every few seconds. The numbers of a live run are those of its
service (`Status`); those of one that has ended are read from its folder. A run of supervised training has no service:
all that is known of it is in its folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rillflow.config.load import FIT, parse
from rillflow.errors import RillflowError
from rillflow.observe.metrics import MetricsReader, described, failures, listed, read_metrics, rewarded_ends
from rillflow.runtime.folder import RunFolder
from rillflow.storage import read_json
from rillflow.storage.startup import Starting
from rillflow.types import PolicyStatus, Status

_PLAIN_EVERY = 5.0
_LONG = 5.0  # seconds in one stage of a start after which they are shown
_SHOWN_EVALUATIONS = 8
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as small bars between their least and greatest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


class Progress:
    """Shows each status it is given; `with Progress(…) as progress: progress.show(status)`.

    `starting` tells it which processes have not started yet: until the first samples come, there is little else to
    show. `target` is the held-out reward that ends the run.
    """

    def __init__(self, title: str, console: Console | None = None, *, target: float | None = None) -> None:
        self._title = title
        self._target = target
        self._parts: Sequence[Starting] = ()
        self._begun = False
        self._console = console or Console(file=sys.stderr)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._rewards: list[float] = []
        self._step = -1
        self._started = time.monotonic()
        self._printed: float | None = None
        self._noted: set[str] = set()
        self._told: set[tuple[str, str]] = set()  # errors of user code whose traceback was shown

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def starting(self, parts: Sequence[Starting]) -> None:
        """Show these processes, which have not started yet, here and in every status until the next call."""
        self._parts = parts
        if not self._begun:
            self._draw(Text(self._startup(), style="yellow"), self._startup(), now=False)

    def show(self, status: Status) -> None:
        self._begun = True
        if status.reward is not None and status.steps != self._step:
            self._step = status.steps
            self._rewards.append(status.reward)
        for subject, note in status.notes.items():
            if subject not in self._noted:
                self._noted.add(subject)
                self.say(f"note: {note}")
        for error in status.errors:
            if (error.kind, error.where) not in self._told:
                self._told.add((error.kind, error.where))
                self.say(described(error))
        self._draw(self._panel(status), self._line(status), now=status.phase == "ended")

    def _draw(self, panel: RenderableType, line: str, *, now: bool) -> None:
        if self._live is not None:
            self._live.update(panel)
        elif now or self._printed is None or time.monotonic() - self._printed >= _PLAIN_EVERY:
            self._printed = time.monotonic()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Something that stays to be read, above the view."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _numbers(self, status: Status) -> dict[str, str]:
        reward = "–" if status.reward is None else f"{status.reward:.3f}"
        failed, ended = failures(status.counts), rewarded_ends(status.counts)
        numbers = {
            "step": f"{status.steps}/{status.total_steps}",
            "reward": reward,
            "samples/s": f"{status.samples_per_second:.1f}",
            "staleness": f"{status.staleness:.2f}",
            "wait": f"{status.wait_fraction:.0%}",
            "nodes": str(status.nodes),
            "time": f"{time.monotonic() - self._started:.0f} s",
        }
        if failed:
            numbers["failed episodes"] = f"{sum(failed.values())} ({listed(failed)})"
        if status.errors:
            numbers["errors of user code"] = str(sum(error.count for error in status.errors))
        return numbers | ({"rewarded ends": listed(ended)} if ended else {})

    def _startup(self) -> str:
        """Show what each process does that is still starting."""
        parts = "; ".join(_part(part) for part in self._parts) or "nothing has been started yet"
        return f"starting ({time.monotonic() - self._started:.0f} s): {parts}"

    def _waits(self, status: Status) -> list[str]:
        """Return what the run waits for, its processes first."""
        if not self._parts or status.phase == "ended":
            return status.waits
        return [f"starting: {'; '.join(_part(part) for part in self._parts)}", *status.waits]

    def _line(self, status: Status) -> str:
        if self._parts and not _has_samples(status):
            return self._startup()
        numbers = "  ".join(f"{name} {value}" for name, value in self._numbers(status).items())
        waits = f"  ({first})" if (first := next(iter(self._waits(status)), "")) else ""
        others = list(status.policies.items())[1:]
        steps = "".join(f"  {name} {policy.steps}/{policy.total_steps}" for name, policy in others)
        return f"[{status.phase}] {numbers}{steps}{waits}"

    def _panel(self, status: Status) -> Panel:
        numbers = self._numbers(status)
        table = Table(*numbers, box=None, padding=(0, 3, 0, 0), header_style="dim")
        table.add_row(*(Text(value, style="bold") for value in numbers.values()))
        # In a grid, because a bare bar does not end its line.
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=max(status.total_steps, 1), completed=status.steps))
        rows: list[RenderableType] = [bar, table]
        if len(status.policies) > 1:
            rows.append(_policies(status.policies))
        if self._rewards:
            rows.append(Text(f"reward  {sparkline(self._rewards)}", style="green"))
        target = "" if self._target is None else f" (the run ends at {self._target:g})"
        for evaluation in status.evaluations[-_SHOWN_EVALUATIONS:]:
            heldout = f"held-out reward at version {evaluation.version}: {evaluation.reward:.3f}{target}"
            rows.append(Text(heldout, style="cyan"))
        if waits := self._waits(status):
            rows.append(Text("; ".join(waits[:3]), style="yellow"))
        return Panel(Group(*rows), title=self._title, subtitle=f"{status.phase}  (Ctrl-C stops)")


def _part(part: Starting) -> str:
    return f"{part.process}: {part.doing}" + (f" ({part.seconds:.0f} s)" if part.seconds >= _LONG else "")


def _has_samples(status: Status) -> bool:
    """Return whether the run has anything to show yet: a ready group, a step or an evaluation."""
    ready = any(policy.ready for policy in status.policies.values())
    return ready or status.steps > 0 or bool(status.evaluations) or status.phase == "ended"


def _policies(policies: Mapping[str, PolicyStatus]) -> Table:
    """A row for each policy: they advance at their own pace."""
    table = Table("policy", "step", "reward", "staleness", "wait", "ready", box=None, padding=(0, 3, 0, 0))
    for name, policy in policies.items():
        reward = "–" if policy.reward is None else f"{policy.reward:.3f}"
        step = f"{policy.steps}/{policy.total_steps}"
        table.add_row(name, step, reward, f"{policy.staleness:.2f}", f"{policy.wait_fraction:.0%}", str(policy.ready))
    return table


class LiveLine:
    """To be entered. Elsewhere than on a terminal a line that is `due` is shown at once; a `quiet` one never is."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal and not quiet else None
        self._printed = 0.0

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, line: str, *, due: bool, drawn: str = "") -> None:
        """`drawn` stands behind the line on a terminal."""
        if self._live is not None:
            self._live.update(Text.assemble((line, "bold"), (f"  {drawn}" if drawn else "", "green")))
        elif not self._quiet and (due or time.monotonic() - self._printed >= _PLAIN_EVERY):
            self._printed = time.monotonic()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def quieten() -> None:
    """Silence transformers; call before it is imported. Variables that are already set win."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})


# ---------------------------------------------------------------- the report of a run

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


# ---------------------------------------------------------------- the report as text and tables


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

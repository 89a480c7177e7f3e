"""The live view of a run: one panel on a terminal, one line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rillflow.types import PolicyStatus, Status

_PLAIN_EVERY = 5.0
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
    """Shows each status it is given; `with Progress(…) as progress: progress.show(status)`."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(file=sys.stderr)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._rewards: list[float] = []
        self._step = -1
        self._started = time.monotonic()
        self._printed = 0.0

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status) -> None:
        if status.reward is not None and status.steps != self._step:
            self._step = status.steps
            self._rewards.append(status.reward)
        if self._live is not None:
            self._live.update(self._panel(status))
        elif time.monotonic() - self._printed >= _PLAIN_EVERY or status.phase == "ended":
            self._printed = time.monotonic()
            self._console.print(self._line(status), highlight=False, markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Something that stays to be read, above the view."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _numbers(self, status: Status) -> dict[str, str]:
        reward = "–" if status.reward is None else f"{status.reward:.3f}"
        return {
            "step": f"{status.steps}/{status.total_steps}",
            "reward": reward,
            "samples/s": f"{status.samples_per_second:.1f}",
            "staleness": f"{status.staleness:.2f}",
            "wait": f"{status.wait_fraction:.0%}",
            "nodes": str(status.nodes),
            "time": f"{time.monotonic() - self._started:.0f} s",
        }

    def _line(self, status: Status) -> str:
        numbers = "  ".join(f"{name} {value}" for name, value in self._numbers(status).items())
        waits = f"  ({status.waits[0]})" if status.waits else ""
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
        for evaluation in status.evaluations[-_SHOWN_EVALUATIONS:]:
            rows.append(Text(f"held-out reward at version {evaluation.version}: {evaluation.reward:.3f}", style="cyan"))
        if status.waits:
            rows.append(Text("; ".join(status.waits[:3]), style="yellow"))
        return Panel(Group(*rows), title=self._title, subtitle=f"{status.phase}  (Ctrl-C stops)")


def _policies(policies: Mapping[str, PolicyStatus]) -> Table:
    """A row for each policy: they advance at their own pace."""
    table = Table("policy", "step", "reward", "staleness", "wait", "ready", box=None, padding=(0, 3, 0, 0))
    for name, policy in policies.items():
        reward = "–" if policy.reward is None else f"{policy.reward:.3f}"
        step = f"{policy.steps}/{policy.total_steps}"
        table.add_row(name, step, reward, f"{policy.staleness:.2f}", f"{policy.wait_fraction:.0%}", str(policy.ready))
    return table

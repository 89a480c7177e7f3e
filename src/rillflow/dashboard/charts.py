"""Charts: which numbers of a run belong into one picture, and their curves as wide as the picture is."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from rillflow.dashboard.readers import Steps, thinned
from rillflow.dashboard.watched import WatchedRun

Axis = Literal["step", "time"]
ROLE = "episode/role_reward/"
_MOST_LINES = 24  # of one chart
_MOST_SOURCES = 8


class Window(msgspec.Struct, frozen=True):
    """How curves are asked for: pixels, the axis, and the part of it (None: all)."""

    width: int = 600
    axis: Axis = "step"
    low: float | None = None
    high: float | None = None


class Chart(msgspec.Struct, frozen=True):
    """A picture of some columns of `metrics.jsonl`, as far as a run has them."""

    key: str
    title: str
    help: str
    columns: tuple[str, ...]
    unit: Literal["", "share", "/s", "s"] = ""
    log: bool = False


class Line(msgspec.Struct):
    name: str
    points: list[tuple[float, float]]
    marks: bool = False  # single measurements, shown as dots


class Picture(msgspec.Struct):
    key: str
    title: str
    help: str
    unit: str
    log: bool
    lines: list[Line]


OVERVIEW = (
    Chart("loss", "Loss", "of the optimizer step", ("loss",)),
    Chart("kl", "KL", "between the policy that sampled and the one that trains", ("approx_kl", "kl")),
    Chart("entropy", "Entropy", "of the policy, per trained token; towards 0 it stops exploring", ("entropy",)),
    Chart("length", "Answer length", "trained tokens of a sample", ("response_length",)),
    Chart("truncated", "Truncated answers", "share of samples cut by their length", ("truncated",), "share"),
    Chart("staleness", "Staleness", "versions between sampling and training: mean and most",
          ("staleness_mean", "staleness_max")),
    Chart("wait", "Trainer's wait", "share of its time without a batch", ("wait_fraction",), "share"),
    Chart("flat", "Groups without variance", "share of groups whose rewards are all equal",
          ("zero_variance_fraction",), "share"),
    Chart("samples", "Samples", "trained per second", ("samples_per_second",), "/s"),
    Chart("tokens", "Tokens", "of the trainer's passes, per second", ("tokens_per_second",), "/s"),
    Chart("mfu", "Model FLOPs utilisation", "share of the devices' peak", ("mfu",), "share"),
    Chart("apart", "Engine and trainer", "mean difference of their log-probs on fresh tokens",
          ("consistency/mean",), log=True),
    Chart("gradient", "Gradient norm", "before clipping", ("grad_norm",)),
    Chart("forks", "Forks", "of an episode's token trees", ("episode/forks",)),
    Chart("accuracy", "Accuracy", "on the rows of the step", ("accuracy",), "share"),
)  # fmt: skip


def reward_chart(run: WatchedRun, window: Window) -> Picture:
    """Reward per policy and role, and on held-out prompts."""
    lines = [*_columns(run, ("reward",), window), *_roles(run, window), *_heldout(run, window)]
    return Picture("reward", "Reward", "mean of the episodes since the last step; dots: held-out", "", False, lines)


def pictures(run: WatchedRun, charts: Sequence[Chart], window: Window) -> list[Picture]:
    """The charts that the run has numbers for."""
    made = [
        Picture(chart.key, chart.title, chart.help, chart.unit, chart.log, list(_columns(run, chart.columns, window)))
        for chart in charts
    ]
    return [picture for picture in made if any(line.points for line in picture.lines)]


def metric_charts(names: Sequence[str]) -> list[Chart]:
    """One chart for each column, as it is called in `metrics.jsonl`."""
    return [Chart(name, name, "", (name,)) for name in names]


def _columns(run: WatchedRun, columns: Sequence[str], window: Window) -> Iterator[Line]:
    several = len(run.curves.policies) > 1
    for policy, steps in run.curves.ordered(run.policies)[:_MOST_LINES]:
        found = [name for name in columns if name in steps.columns]
        for name in found:
            label = " ".join(([policy] if several else []) + ([name] if len(found) > 1 else []))
            yield Line(label or policy, curve(run, steps, name, window))


def _roles(run: WatchedRun, window: Window) -> Iterator[Line]:
    """Yield the reward of each role. Steps of several policies may report a role: those of the first policy count."""
    found: dict[str, Steps] = {}
    for steps in run.curves.policies.values():
        for name in steps.columns:
            if name.startswith(ROLE):
                found.setdefault(name, steps)
    if len(found) > 1:
        for name, steps in sorted(found.items())[:_MOST_LINES]:
            yield Line(f"role {name.removeprefix(ROLE)}", curve(run, steps, name, window))


def _heldout(run: WatchedRun, window: Window) -> Iterator[Line]:
    rounds = [done for done in run.curves.evaluations if _number(done.get("reward")) is not None]
    if rounds:
        yield _rounds(run, rounds, "held-out", [done["reward"] for done in rounds], window)
    sources = sorted({source for done in rounds for source in done.get("by_source") or {}})
    for source in sources[:_MOST_SOURCES] if len(sources) > 1 else []:
        told = [done for done in rounds if _number(done["by_source"].get(source)) is not None]
        yield _rounds(run, told, f"held-out {source}", [done["by_source"][source] for done in told], window)


def _rounds(run: WatchedRun, rounds: list[dict[str, Any]], name: str, values: list[float], window: Window) -> Line:
    """Evaluations at the step that they were asked for."""
    at = [done.get("step", 0) if window.axis == "step" else done["time"] - run.started for done in rounds]
    x, y = _part(array("d", at), array("d", values), window)
    return Line(name, thinned(x, y, window.width), marks=True)


def curve(run: WatchedRun, steps: Steps, name: str, window: Window) -> list[tuple[float, float]]:
    """One column over the window's axis."""
    if window.axis == "step":
        at = steps.step
    else:
        started = run.started
        at = array("d", [time - started for time in steps.time])
    return thinned(*_part(at, steps.columns[name], window), window.width)


def _part(x: array[float], y: array[float], window: Window) -> tuple[array[float], array[float]]:
    """Return the points in the window and one more on either side, so that lines run to the edge."""
    if window.low is None or window.high is None:
        return x, y
    low, high = max(bisect_left(x, window.low) - 1, 0), bisect_right(x, window.high) + 1
    return x[low:high], y[low:high]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None

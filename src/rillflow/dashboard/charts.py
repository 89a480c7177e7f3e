"""Charts: which numbers of a run belong into one picture, and their curves as wide as the picture is.

The panels that are made of charts: the first one, with the state of the run and its advisories; single columns; and two
runs side by side.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from rillflow.dashboard.readers import Steps, thinned
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.observe.advisories import advise

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


# ---------------------------------------------------------------- panels

_SHOWN_WAITS = 6
_MOST_CHARTS = 60  # that one answer has


def run_list(runs: list[WatchedRun]) -> list[dict[str, Any]]:
    """Every run that is shown, for the menu."""
    return [
        {
            "name": run.name,
            "recipe": run.recipe.get("name", ""),
            "description": run.recipe.get("description", ""),
            "started": run.started,
            **run.state(),
        }
        for run in runs
    ]


def overview(run: WatchedRun, live: Live | None, window: Window) -> dict[str, Any]:
    run.curves.follow()
    return {
        "run": heading(run, live),
        "figures": figures(run, live),
        "policies": policy_rows(run, live),
        "waits": live.status.waits[:_SHOWN_WAITS] if live else [],
        "charts": [reward_chart(run, window), *pictures(run, OVERVIEW, window)],
        "torn": run.curves.torn,
    }


def heading(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    """Name, state and age. A run that says it runs but does not answer has been killed, or is starting."""
    state = run.state()
    started, ended = run.started, state.get("time", run.started)
    reason = state.get("reason", "")
    if state["state"] == "running" and live is None:
        reason = "its service does not answer: it is starting, or was killed"
    if live is not None and live.status.phase == "ended":
        reason = live.status.reason
    return {
        "name": run.name,
        "recipe": run.recipe.get("name", ""),
        "description": run.recipe.get("description", ""),
        "state": state["state"],
        "reason": reason,
        "live": live is not None,
        "started": started,
        "ended": None if state["state"] == "running" else max(ended, started),
        "folder": str(run.folder.root),
    }


def figures(run: WatchedRun, live: Live | None) -> list[dict[str, Any]]:
    """The numbers that people ask for first; those that the run does not have are left out."""
    steps = run.curves.policies.get(run.first_policy)
    rounds = [done["reward"] for done in run.curves.evaluations if done.get("reward") is not None]
    found: list[dict[str, Any]] = []

    def add(name: str, value: float | None, unit: str = "", note: str = "") -> None:
        if value is not None and math.isfinite(value):
            found.append({"name": name, "value": value, "unit": unit, "note": note})

    last = steps.last if steps is not None else lambda name: None
    total = _total_steps(run, live)
    add("step", _last_step(run), "", f"of {total}" if total else "")
    add("reward", last("reward"))
    if rounds:
        add("held-out", rounds[-1], "", f"first {rounds[0]:.3f}, best {max(rounds):.3f}")
    add("loss", last("loss") if not rounds else None)
    add("staleness", last("staleness_mean"), "", "versions")
    add("trainer waits", live.status.wait_fraction if live else last("wait_fraction"), "share")
    add("samples", live.status.samples_per_second if live else last("samples_per_second"), "/s")
    add("tokens", last("tokens_per_second"), "/s")
    add("MFU", last("mfu"), "share")
    add("nodes", live.status.nodes if live else None)
    add("rollbacks", run.curves.rollbacks or None)
    return found


def _last_step(run: WatchedRun) -> float | None:
    steps = run.curves.policies.get(run.first_policy)
    return steps.step[-1] if steps else None


def _total_steps(run: WatchedRun, live: Live | None) -> int:
    if live is not None:
        return live.status.total_steps
    of = (run.recipe.get("policies") or {}).get(run.first_policy) or run.recipe
    trainer = of.get("trainer") if isinstance(of, dict) else None
    return int(trainer.get("steps") or 0) if isinstance(trainer, dict) else 0


def policy_rows(run: WatchedRun, live: Live | None) -> list[dict[str, Any]]:
    """One row for each policy: how far its trainer is."""
    rows = []
    for policy in run.policies:
        steps = run.curves.policies.get(policy)
        now = live.status.policies.get(policy) if live else None
        rows.append(
            {
                "policy": policy,
                "version": now.version if now else (steps.version[-1] if steps else None),
                "steps": now.steps if now else (steps.step[-1] if steps else 0),
                "reward": now.reward if now else (steps.last("reward") if steps else None),
                "ready": now.ready if now else None,
            }
        )
    return rows


def metrics(run: WatchedRun, names: list[str], window: Window) -> dict[str, Any]:
    """Any columns of `metrics.jsonl`, and the names of all."""
    run.curves.follow()
    known = run.curves.names()
    wanted = [name for name in names if name in known][:_MOST_CHARTS]
    return {"names": known, "charts": pictures(run, metric_charts(wanted), window)}


# ---------------------------------------------------------------- advisories, problems first


FRESH = 10.0  # seconds; those of a run that has ended are used six times as long


class Advice:
    """The advisories of each run, as they were last made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made: dict[str, tuple[float, dict[str, Any]]] = {}

    def of(self, run: WatchedRun, live: Live | None) -> dict[str, Any]:
        until, found = self._made.get(run.name, (0.0, {}))
        if self._clock() >= until:
            found = _advice(run, live)
            self._made[run.name] = self._clock() + (FRESH if run.running else 6 * FRESH), found
        return found


def _advice(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    facts = run.facts.read(live.status if live else None, live.nodes if live else None, run.now())
    return {"advisories": msgspec.to_builtins(advise(facts)), "unread": facts.unread}


# ---------------------------------------------------------------- two runs side by side


_MOST_DIFFERENCES = 400
_NULL = "null"


def compare(run: WatchedRun, other: WatchedRun, window: Window) -> dict[str, Any]:
    for one in (run, other):
        one.curves.follow()
    return {
        "runs": [heading(run, None), heading(other, None)],
        "figures": _beside(figures(run, None), figures(other, None)),
        "charts": _together(_pictures(run, window), _pictures(other, window)),
        "recipe": differences(run.recipe, other.recipe),
    }


def _beside(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for side, found in (("left", left), ("right", right)):
        for one in found:
            rows.setdefault(one["name"], {"name": one["name"], "unit": one["unit"], "left": None, "right": None})
            rows[one["name"]][side] = one["value"]
    return list(rows.values())


def _pictures(run: WatchedRun, window: Window) -> list[Picture]:
    return [reward_chart(run, window), *pictures(run, OVERVIEW, window)]


def _together(left: list[Picture], right: list[Picture]) -> list[Picture]:
    """One chart for each that either run has; `A` and `B` before the names of lines tell whose they are."""
    both: dict[str, Picture] = {}
    for mark, found in (("A", left), ("B", right)):
        for picture in found:
            joined = both.setdefault(picture.key, msgspec.structs.replace(picture, lines=[]))
            joined.lines += [msgspec.structs.replace(line, name=f"{mark} {line.name}") for line in picture.lines]
    return list(both.values())


def differences(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not the same, by their path in the recipe; unset ones count as null."""
    one, other = dict(_flat(left)), dict(_flat(right))
    rows = [
        {"path": path, "left": one.get(path), "right": other.get(path)}
        for path in dict.fromkeys((*one, *other))
        if one.get(path, _NULL) != other.get(path, _NULL) and path not in ("name", "description")
    ]
    return {"rows": rows[:_MOST_DIFFERENCES], "left_out": max(len(rows) - _MOST_DIFFERENCES, 0)}


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """The leaves of a recipe; an empty list or mapping is one, too."""
    if isinstance(value, dict) and value:
        return [leaf for key, one in value.items() for leaf in _flat(one, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and value:
        return [leaf for index, one in enumerate(value) for leaf in _flat(one, f"{path}[{index}]")]
    return [(path, msgspec.json.encode(value).decode() if not isinstance(value, str) else value)]

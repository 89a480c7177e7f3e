"""The first panel: how the run stands, its advisories, its curves; and two runs side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rillflow.dashboard.charts import OVERVIEW, Picture, Window, metric_charts, pictures, reward_chart
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.observe.advisories import advise

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

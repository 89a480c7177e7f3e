"""The first panel: how the run stands, what to look at first, and its curves."""

from __future__ import annotations

import math
from typing import Any

from rillflow.dashboard.views.charts import OVERVIEW, Window, metric_charts, pictures, reward_chart
from rillflow.dashboard.watched import Live, WatchedRun

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

"""The data algorithms of a run: its curators, filters and sampler, their effect and their state."""

from __future__ import annotations

import json
from typing import Any

from rillflow.dashboard.views.charts import Chart, Window, pictures
from rillflow.dashboard.watched import WatchedRun
from rillflow.dataflow.ledger.snapshot import Snapshot

_CHARTS = (
    Chart("flat", "Groups without variance", "share of complete groups whose rewards are all equal",
          ("zero_variance_fraction",), "share"),
    Chart("replayed", "Replayed samples", "of a batch", ("replayed",)),
    Chart("spread", "Spread of rewards", "standard deviation in a batch", ("reward_std",)),
    Chart("advantage", "Advantages", "mean and spread in a batch", ("advantage_mean", "advantage_std")),
    Chart("ess", "Effective sample size", "share that the weights of old samples leave", ("ess",), "share"),
    Chart("clipped", "Clipped tokens", "share, below and above", ("clip_low", "clip_high"), "share"),
)  # fmt: skip
_TRAINER = ("algorithm", "advantage", "aggregation", "lr", "steps")  # settings that are shown
_MOST_STATE = 200  # entries of a hook's state that are shown
_LONGEST = 400


def algorithms(run: WatchedRun, window: Window) -> dict[str, Any]:
    run.curves.follow()
    dataflow = run.recipe.get("dataflow") or {}
    found = run.ledger(_told, {"skipped": 0, "taken": 0, "filtered": [], "groups": 0, "states": []})
    return {
        "curators": [_hook(hook) for hook in dataflow.get("curators") or ()],
        "filters": [_hook(hook) for hook in dataflow.get("filters") or ()],
        "sampler": _hook(dataflow.get("sampler") or "earliest_deadline"),
        "staleness": dataflow.get("staleness"),
        "trainers": _trainers(run),
        **found,
        "charts": pictures(run, _CHARTS, window),
    }


def _hook(given: Any) -> dict[str, Any]:
    """A hook as a resolved recipe names it, with its options."""
    if isinstance(given, dict):
        return {"name": str(given.get("name")), "options": given.get("options") or {}}
    return {"name": str(given), "options": {}}


def _trainers(run: WatchedRun) -> list[dict[str, Any]]:
    rows = []
    for name, policy in (run.recipe.get("policies") or {}).items():
        trainer = policy.get("trainer") or {}
        chosen = {
            key: trainer[key] for key in ("algorithm", "advantage", "aggregation", "lr", "steps") if trainer.get(key)
        }
        rows.append({"policy": name, **chosen})
    return rows


def _told(reads: Snapshot) -> dict[str, Any]:
    counters = {row["name"]: row["value"] for row in reads.all("SELECT name, value FROM counters")}
    filtered = reads.all(
        "SELECT stream, cause, n FROM share_tally WHERE state = 'filtered' AND n != 0 ORDER BY stream, n DESC"
    )
    groups = reads.value("SELECT sum(n) FROM share_tally")
    states = reads.all(
        "SELECT hook, key, substr(value, 1, ?) AS value FROM hook_state ORDER BY hook, key LIMIT ?",
        (_LONGEST, _MOST_STATE),
    )
    return {
        "taken": counters.get("cursor", 0),
        "skipped": counters.get("skipped", 0),
        "filtered": [{"policy": row["stream"], "cause": row["cause"], "count": row["n"]} for row in filtered],
        "groups": int(groups or 0),
        "states": [{"hook": row["hook"], "key": row["key"], "value": _plain(row["value"])} for row in states],
    }


def _plain(text: str) -> str:
    """Numbers of a state shortened, as people read them."""
    try:
        value = json.loads(text)
    except ValueError:  # cut
        return f"{text}…"
    return f"{value:.4g}" if isinstance(value, float) else text

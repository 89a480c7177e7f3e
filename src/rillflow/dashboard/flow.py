"""From prompts to trained samples, as counts with causes, and the data algorithms (curators, filters, sampler) with
their effect and their state.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rillflow.dashboard.charts import Chart, Window, pictures
from rillflow.dashboard.watched import WatchedRun
from rillflow.dataflow.ledger.database import Snapshot
from rillflow.dataflow.ledger.streams import ELSEWHERE

_FAILURES, _ENDS, _RETURNED = "failures.", "ended.", "returned."
_NODE_COUNTS = ("leased", "completed", "failed", "returned", "refused", "produced", "accepted", "consumed", "stale")
_OPEN = {"playing": "being played", "open": "complete, waiting to be trained"}


@dataclass
class _Counts:
    """The running counts of one ledger, or of several together."""

    counters: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by lane, state and cause
    shares: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by stream, state and cause
    nodes: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Counts) -> None:
        self.counters.update(other.counters)
        self.groups.update(other.groups)
        self.shares.update(other.shares)
        self.nodes.update(other.nodes)


def flow(run: WatchedRun) -> dict[str, Any]:
    """Return the counts of all ledgers of the run together."""
    found = run.ledgers(_read)
    if not found:
        return {"prompts": None, "evaluation": None, "episodes": None, "samples": None, "streams": []}
    return _flow(_sum(found))


def _sum(found: Sequence[_Counts]) -> _Counts:
    whole = _Counts()
    for counts in found:
        whole.add(counts)
    return whole


def _read(reads: Snapshot) -> _Counts:
    sums = ", ".join(f"sum({name}) AS {name}" for name in (*_NODE_COUNTS, "held"))
    nodes = reads.all(f"SELECT {sums} FROM nodes")[0]
    tally, shares = "lane, state, cause, n FROM tally", "stream, state, cause, n FROM share_tally"
    return _Counts(
        Counter({name: value for name, value in reads.all("SELECT name, value FROM counters")}),
        Counter({(lane, state, cause): n for lane, state, cause, n in reads.all(f"SELECT {tally} WHERE n != 0")}),
        Counter({(stream, state, cause): n for stream, state, cause, n in reads.all(f"SELECT {shares} WHERE n != 0")}),
        Counter({name: int(nodes[name] or 0) for name in (*_NODE_COUNTS, "held")}),
    )


def _flow(counts: _Counts) -> dict[str, Any]:
    counters, made, lanes = counts.counters, counts.nodes, _ends(counts.groups)
    return {
        "prompts": {
            "taken": counters["cursor"] - counters[ELSEWHERE],
            "skipped": counters["skipped"],
            "admitted": counters["admitted.train"],
            "ends": lanes.get("train", []),
            "words": _OPEN,
        },
        "evaluation": {"admitted": counters["admitted.eval"], "ends": lanes.get("eval", [])},
        "episodes": {
            "leased": made["leased"],
            "completed": made["completed"],
            "failed": made["failed"],
            "failures": _named(counters, _FAILURES),
            "returned": made["returned"],
            "returned_by": _named(counters, _RETURNED),
            "refused": made["refused"],
            "held": made["held"],
            "rewarded_ends": _named(counters, _ENDS),
        },
        "samples": {
            "produced": made["produced"],
            "accepted": made["accepted"],
            "entered": counters["samples.entered"],
            "consumed": made["consumed"],
            "stale": made["stale"],
        },
        "streams": [{"policy": policy, "ends": ends} for policy, ends in _ends(counts.shares).items()],
        "rolled_back": counters["rolled_back"],
        "quarantined": counters["quarantined"],
    }


def _ends(counted: Counter[tuple[str, str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Return the counts of each lane or stream by state and cause."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (first, state, cause), number in sorted(counted.items()):
        found[first].append({"state": state, "cause": cause, "count": number})
    return found


def _named(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix) and n}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# ---------------------------------------------------------------- data algorithms


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
    counts = _sum(run.ledgers(_read))
    return {
        "curators": [_hook(hook) for hook in dataflow.get("curators") or ()],
        "filters": [_hook(hook) for hook in dataflow.get("filters") or ()],
        "sampler": _hook(dataflow.get("sampler") or "earliest_deadline"),
        "staleness": dataflow.get("staleness"),
        "trainers": _trainers(run),
        "taken": counts.counters["cursor"] - counts.counters[ELSEWHERE],
        "skipped": counts.counters["skipped"],
        "filtered": _filtered(counts.shares),
        "groups": counts.shares.total(),
        "states": _hook_states(run.ledgers(_states)),
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
        chosen = {key: trainer[key] for key in _TRAINER if trainer.get(key)}
        rows.append({"policy": name, **chosen})
    return rows


def _filtered(counted: Counter[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Return the groups that filters dropped, by stream and cause, the most frequent cause first."""
    ordered = sorted(counted.items(), key=lambda item: (item[0][0], -item[1]))
    return [
        {"policy": stream, "cause": cause, "count": number}
        for (stream, state, cause), number in ordered
        if state == "filtered"
    ]


def _states(reads: Snapshot) -> list[dict[str, Any]]:
    states = reads.all(
        "SELECT hook, key, substr(value, 1, ?) AS value FROM hook_state ORDER BY hook, key LIMIT ?",
        (_LONGEST, _MOST_STATE),
    )
    return [{"hook": row["hook"], "key": row["key"], "value": _plain(row["value"])} for row in states]


def _hook_states(found: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the states of the hooks of all ledgers. With several, each state names its ledger."""
    if len(found) < 2:
        return [state for states in found for state in states]
    named = [
        {**state, "key": f"ledger {number}: {state['key']}"} for number, states in enumerate(found) for state in states
    ]
    return sorted(named, key=lambda state: str(state["hook"]))[:_MOST_STATE]


def _plain(text: str) -> str:
    """Numbers of a state shortened, as people read them."""
    try:
        value = json.loads(text)
    except ValueError:  # cut
        return f"{text}…"
    return f"{value:.4g}" if isinstance(value, float) else text

"""The balance between rollout nodes and trainer, now and over time, and the maintainer's decisions."""

from __future__ import annotations

from typing import Any

import msgspec

from rillflow.dashboard.views.charts import Line, Picture
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.dataflow.balance import SATED, STARVING
from rillflow.dataflow.balance_ledger import read_balance
from rillflow.errors import RillflowError, RunError
from rillflow.resources.workers import Worker

_MOST_LINES = 200


def balance(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    run.curves.follow()
    reports = run.curves.balances
    return {
        "live": live is not None,
        "balance": _balance(run, live),
        "charts": [picture for picture in _pictures(reports) if picture.lines],
        "zones": {"starving": STARVING, "sated": SATED},
        "decisions": run.lines("maintainer.jsonl", _MOST_LINES)[::-1],
        "maintained": bool((run.recipe.get("resources") or {}).get("scaling", {}).get("enabled")),
        "workers": _workers(run),
    }


def _balance(run: WatchedRun, live: Live | None) -> dict[str, Any] | None:
    if live is not None:
        found = live.balance
    else:
        try:
            found = read_balance(run.folder.ledger, run.first_policy)
        except RunError:  # it has not begun
            return None
    return {"latest": msgspec.to_builtins(found.latest), "current": msgspec.to_builtins(found.current)}


def _pictures(reports: list[dict[str, Any]]) -> list[Picture]:
    """The reports so far, by version."""

    def line(name: str, *path: str) -> list[Line]:
        points = []
        for report in reports:
            value: Any = report
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                points.append((float(report["version"]), float(value)))
        return [Line(name, points)] if points else []

    wait = line("wait fraction", "window", "wait_fraction")
    ratio = line("entered / consumed", "production", "produce_consume_ratio")
    sizes = [*line("GPUs", "production", "gpus"), *line("target", "decision", "target")]
    made = line("samples/s per GPU", "production", "throughput_per_gpu")
    told = [
        (
            "wait",
            "The trainer's wait",
            "the pool is too small above 10 %, and may be too large below 5 %",
            "share",
            wait,
        ),
        ("size", "Size of the pool", "current GPUs, and the target of the rule", "", sizes),
        ("ratio", "Entered per trained sample", "samples that entered a stream for each trained one", "", ratio),
        ("made", "Throughput", "samples per second and GPU", "/s", made),
    ]
    return [Picture(key, title, text, unit, False, lines) for key, title, text, unit, lines in told]


def _workers(run: WatchedRun) -> list[dict[str, Any]]:
    """The run's own workers, with their tags and what they do."""
    try:
        found: list[Worker] = run.folder.workers.read() if run.folder.workers.path.is_file() else []
    except (OSError, RillflowError):
        return []
    return [
        {"name": one.name, "tags": sorted(one.tags), "process": one.process, "rank": one.rank, "lost": one.lost}
        for one in found
    ]

"""The timeline (a lane for each worker, and the share of its time that it was idle), the logs of a run's processes, and
the errors of the user's code with their tracebacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from rillflow.dashboard.readers import IDLE, Spans
from rillflow.dashboard.watched import WatchedRun, tail
from rillflow.dataflow.ledger.database import Snapshot
from rillflow.errors import BadRequest
from rillflow.storage.spans import STATES

# ---------------------------------------------------------------- timeline


_MOST_LANES = 256

Bar = tuple[str, float, float]


def timeline(run: WatchedRun, width: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Return the timeline. `low` and `high` are seconds since the first span of any worker; bars have the same
    origin."""
    workers = run.lanes.follow()
    if not workers:
        return {"begin": 0.0, "seconds": 0.0, "low": 0.0, "high": 0.0, "states": STATES, "lanes": [], "left_out": 0}
    begin, end = whole(workers.values())
    if low is None or high is None or high <= low:
        low, high = 0.0, end - begin
    shown = dict(sorted(workers.items())[:_MOST_LANES])
    return {
        "begin": begin,
        "seconds": end - begin,
        "low": low,
        "high": high,
        "states": STATES,
        "lanes": [
            {
                "worker": worker,
                "shares": shares(spans, begin + low, begin + high),
                "bars": bars(spans, begin, begin + low, begin + high, width),
            }
            for worker, spans in shown.items()
        ],
        "left_out": len(workers) - len(shown),
    }


def whole(workers: Iterable[Spans]) -> tuple[float, float]:
    """Return the time from the first to the last activity of any worker; of idle workers, their idle time."""
    lanes = list(workers)
    busy = [(spans.begin[own], spans.end[own]) for spans in lanes if (own := spans.state != IDLE).any()]
    every = busy or [(spans.begin, spans.end) for spans in lanes]
    return float(min(begin[0] for begin, _ in every)), float(max(end[-1] for _, end in every))


def shares(spans: Spans, low: float, high: float) -> dict[str, float]:
    """Return the share of each state in the window. Time without a span counts as idle: the worker did not run."""
    if high <= low:
        return {}
    found = dict(zip(STATES, (spans.seconds(np.array([low, high]))[:, 0] / (high - low)).tolist(), strict=True))
    found["idle"] += max(0.0, 1.0 - sum(found.values()))
    return found


def bars(spans: Spans, origin: float, low: float, high: float, width: int) -> list[Bar]:
    """Return the spans of the window, cut to it. With more spans than pixels, each pixel shows the state that fills
    most of it, and neighbours of one state are one bar."""
    part = spans.within(low, high)
    if len(part) > width:
        edges = np.linspace(low, high, width + 1)
        filled = spans.seconds(edges)
        known = filled.sum(axis=0) > 0
        part = Spans(edges[:-1][known], edges[1:][known], filled.argmax(axis=0)[known].astype(np.int8)).joined()
    begins, ends = (part.begin - origin).tolist(), (part.end - origin).tolist()
    return [(STATES[code], begin, end) for code, begin, end in zip(part.state.tolist(), begins, ends, strict=True)]


# ---------------------------------------------------------------- logs and errors


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LEVEL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_TAIL = 512 << 10  # bytes of a log that are looked at
_MOST_LINES = 2000
_MOST_ERRORS = 100
_MOST_FAILURES = 50
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def log_files(run: WatchedRun) -> dict[str, Any]:
    """Return the logs, the errors of user code, and the last episodes that failed after all attempts."""
    folder = run.folder.root / "logs"
    files = []
    for path in sorted(folder.glob("*.log") if folder.is_dir() else ()):
        size = path.stat().st_size
        data = tail(path, _TAIL).decode(errors="replace")
        found = [match[1] for line in data.splitlines() if (match := _LEVEL.match(line))]
        files.append(
            {
                "name": path.name.removesuffix(".log"),
                "bytes": size,
                "errors": sum(level in ("ERROR", "CRITICAL") for level in found),
                "warnings": found.count("WARNING"),
            }
        )
    told = run.ledgers(_errors)
    return {
        "files": files,
        "user_errors": _sum_errors([error for errors, _ in told for error in errors]),
        "failures": [failure for _, failures in told for failure in failures][:_MOST_FAILURES],
    }


def _sum_errors(errors: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each error once, with the counts of all ledgers, the most frequent first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for error in errors:
        key = (error["kind"], error["where"])
        found[key] = {**error, "count": error["count"] + found.get(key, {"count": 0})["count"]}
    return sorted(found.values(), key=lambda error: -error["count"])[:_MOST_ERRORS]


def _errors(reads: Snapshot) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the errors of user code and the last failed episodes of one ledger."""
    errors = reads.all("SELECT * FROM user_errors ORDER BY n DESC, kind, place LIMIT ?", (_MOST_ERRORS,))
    # By the groups, which have an index; of groups that were trained all the same, the user errors tell.
    failures = reads.all(
        "SELECT t.id, t.cause, t.error, t.last_node FROM (SELECT id, ord FROM groups WHERE lane = 'train' AND "
        "state = 'failed' ORDER BY ord DESC LIMIT ?) g JOIN tasks t ON t.grp = g.id WHERE t.state = 'failed' "
        "ORDER BY g.ord DESC LIMIT ?",
        (_MOST_FAILURES, _MOST_FAILURES),
    )
    return (
        [
            dict(kind=row["kind"], where=row["place"], error=row["error"], trace=row["trace"], count=row["n"])
            for row in errors
        ],
        [
            {"task": row["id"], "cause": row["cause"], "error": row["error"], "node": row["last_node"]}
            for row in failures
        ],
    )


def log_lines(run: WatchedRun, name: str, level: str = "DEBUG", find: str = "") -> dict[str, Any]:
    """The last lines of one log, of `level` and above, that hold `find`. Lines without a level belong to the one
    before them, so a traceback stays with its error."""
    if not _NAME.fullmatch(name) or level not in LEVELS:
        raise BadRequest(f"unknown log {name[:80]!r} or level {level[:20]!r}", "the list of logs has their names")
    least, wanted, current = LEVELS.index(level), find.lower(), "INFO"
    kept: list[tuple[str, str]] = []
    for line in tail(run.folder.log(name), _TAIL).decode(errors="replace").splitlines():
        match = _LEVEL.match(line)
        current = match[1] if match else current
        if LEVELS.index(current) >= least and wanted in line.lower():
            kept.append((current, line))
    return {"name": name, "lines": kept[-_MOST_LINES:], "cut": len(kept) > _MOST_LINES}

"""What the processes of a run have written, and the errors of the user's code with their tracebacks.

Only the end of a log is read, however long it is. Secrets are blotted out when a log is written (`config.secrets`).
"""

from __future__ import annotations

import re
from typing import Any

from rillflow.dashboard.watched import WatchedRun, tail
from rillflow.dataflow.ledger.snapshot import Snapshot
from rillflow.errors import BadRequest

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
    return {"files": files, **run.ledger(_errors, {"user_errors": [], "failures": []})}


def _errors(reads: Snapshot) -> dict[str, Any]:
    errors = reads.all("SELECT * FROM user_errors ORDER BY n DESC, kind, place LIMIT ?", (_MOST_ERRORS,))
    # By the groups, which have an index; of groups that were trained all the same, the user errors tell.
    failures = reads.all(
        "SELECT t.id, t.cause, t.error, t.last_node FROM (SELECT id, ord FROM groups WHERE lane = 'train' AND "
        "state = 'failed' ORDER BY ord DESC LIMIT ?) g JOIN tasks t ON t.grp = g.id WHERE t.state = 'failed' "
        "ORDER BY g.ord DESC LIMIT ?",
        (_MOST_FAILURES, _MOST_FAILURES),
    )
    return {
        "user_errors": [
            dict(kind=row["kind"], where=row["place"], error=row["error"], trace=row["trace"], count=row["n"])
            for row in errors
        ],
        "failures": [
            {"task": row["id"], "cause": row["cause"], "error": row["error"], "node": row["last_node"]}
            for row in failures
        ],
    }


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

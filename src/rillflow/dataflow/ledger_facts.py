"""What a ledger says about the health of its run, read from its file: during the run, after it, after a crash.

Nothing is written, and no query reads more than the latest groups of a run: the costs do not grow with its length.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import Any

import msgspec

from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.ledger.tables import SUM
from rillflow.dataflow.ledger.tasks import NOTES
from rillflow.errors import CorruptData
from rillflow.types import UserError

LATEST = 64  # groups that episodes and samples are looked at of
_ENDED = ("open", "trained", "filtered", "expired")
_SAMPLES = (
    "SELECT s.policy, s.reward, s.trained, s.truncated FROM samples s "
    "WHERE s.grp IN (SELECT value FROM json_each(?)) AND s.trained > 0"
)
_EPISODES = (
    "SELECT calls, seconds, json_extract(metrics, '$.forks') AS forks, "
    "json_extract(metrics, '$.tokens_forwarded') AS forwarded, json_extract(metrics, '$.tokens_trained') AS trained "
    "FROM tasks WHERE grp IN (SELECT value FROM json_each(?)) AND state = 'done'"
)


class SampleFacts(msgspec.Struct, frozen=True):
    """The samples of one policy in the latest groups. `by_length` is the correlation of reward and trained tokens; None
    where either is the same for all."""

    count: int
    groups: int
    lowest: float
    highest: float
    mean: float
    tokens: float
    truncated: float
    by_length: float | None = None


class EpisodeFacts(msgspec.Struct, frozen=True):
    """Means over the episodes of the latest groups."""

    count: int
    calls: float
    seconds: float
    forks: float
    forwarded: float
    trained: float


class NodeFacts(msgspec.Struct, frozen=True):
    """A rollout node. `pace` is the decayed mean of its episodes' seconds."""

    name: str
    state: str
    seen: float
    completed: int
    failed: int
    pace: float | None
    versions: dict[str, int]


class LedgerFacts(msgspec.Struct, frozen=True):
    """`groups` counts the groups of training by state and by state and cause; `completed` and `failed` count the
    episodes of all lanes. `heads` are the versions of the policies, `last_end` the time of the latest end of an
    episode, `last_failure` the cause and error of the latest that failed."""

    groups: dict[str, int] = {}
    completed: int = 0
    failed: int = 0
    counters: dict[str, int] = {}
    heads: dict[str, int] = {}
    notes: dict[str, str] = {}
    errors: list[UserError] = []
    nodes: list[NodeFacts] = []
    samples: dict[str, SampleFacts] = {}
    episodes: EpisodeFacts | None = None
    last_end: float | None = None
    last_failure: str = ""


def read_ledger_facts(path: Path) -> LedgerFacts:
    """Read the ledger at `path` as it was last committed. CorruptData where it cannot be read as one."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN")  # one snapshot for all queries
            return _facts(connection, path)
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise CorruptData(f"the ledger {path} cannot be read: {error}", "restore the run folder from a copy") from error


def _facts(db: sqlite3.Connection, path: Path) -> LedgerFacts:
    known = "SELECT key, value FROM meta WHERE key IN ('format', 'last_failure', ?)"
    meta = dict(db.execute(known, (NOTES,)).fetchall())
    if meta.get("format") != str(FORMAT):
        raise CorruptData(
            f"{path} has ledger format {meta.get('format', 'none')}, this version reads {FORMAT}",
            "use the version of rillflow that wrote the run",
        )
    latest = _latest_groups(db)
    ends = db.execute("SELECT total(completed), total(failed), max(ended_at) FROM nodes").fetchone()
    return LedgerFacts(
        groups=_counts(db, "SELECT state, cause, n FROM tally WHERE lane = 'train'"),
        completed=int(ends[0]),
        failed=int(ends[1]),
        counters=dict(db.execute("SELECT name, value FROM counters").fetchall()),
        heads=dict(db.execute("SELECT name, version FROM policies").fetchall()),
        notes=json.loads(meta.get(NOTES, "{}")),
        errors=[_error(row) for row in db.execute("SELECT * FROM user_errors ORDER BY n DESC, kind, place LIMIT 8")],
        nodes=[_node(row) for row in db.execute("SELECT * FROM nodes WHERE name != ? ORDER BY name", (SUM,))],
        samples=dict(_samples(db, latest)),
        episodes=_episodes(db, latest),
        last_end=ends[2],
        last_failure=str(json.loads(meta.get("last_failure", '""'))),
    )


def _counts(db: sqlite3.Connection, query: str) -> dict[str, int]:
    """Return counts by state, and by state and cause."""
    counts: dict[str, int] = {}
    for state, cause, number in db.execute(query):
        counts[state] = counts.get(state, 0) + number
        if cause:
            counts[f"{state}.{cause}"] = number
    return counts


def _latest_groups(db: sqlite3.Connection) -> str:
    """Return the ids of the latest complete groups of training, as JSON."""
    rows: list[tuple[int, str]] = []
    for state in _ENDED:
        query = "SELECT ord, id FROM groups WHERE lane = 'train' AND state = ? ORDER BY ord DESC LIMIT ?"
        rows += [(row["ord"], row["id"]) for row in db.execute(query, (state, LATEST))]
    return json.dumps([group for _, group in sorted(rows)[-LATEST:]])


def _samples(db: sqlite3.Connection, groups: str) -> Iterator[tuple[str, SampleFacts]]:
    found: dict[str, list[sqlite3.Row]] = {}
    for row in db.execute(_SAMPLES, (groups,)):
        found.setdefault(row["policy"], []).append(row)
    for policy, rows in found.items():
        rewards, lengths = [row["reward"] for row in rows], [float(row["trained"]) for row in rows]
        yield (
            policy,
            SampleFacts(
                count=len(rows),
                groups=len(json.loads(groups)),
                lowest=min(rewards),
                highest=max(rewards),
                mean=fmean(rewards),
                tokens=fmean(lengths),
                truncated=fmean(row["truncated"] for row in rows),
                by_length=_correlation(rewards, lengths),
            ),
        )


def _correlation(rewards: Sequence[float], lengths: Sequence[float]) -> float | None:
    try:
        return correlation(rewards, lengths)
    except (StatisticsError, OverflowError):  # fewer than two, or all the same
        return None


def _episodes(db: sqlite3.Connection, groups: str) -> EpisodeFacts | None:
    rows = db.execute(_EPISODES, (groups,)).fetchall()
    if not rows:
        return None
    names = ("calls", "seconds", "forks", "forwarded", "trained")
    return EpisodeFacts(len(rows), **{name: fmean(float(row[name] or 0.0) for row in rows) for name in names})


def _error(row: sqlite3.Row) -> UserError:
    return UserError(kind=row["kind"], where=row["place"], error=row["error"], trace=row["trace"], count=row["n"])


def _node(row: sqlite3.Row) -> NodeFacts:
    versions: Any = json.loads(row["versions"])
    return NodeFacts(
        name=row["name"],
        state=row["state"],
        seen=row["seen"],
        completed=row["completed"],
        failed=row["failed"],
        pace=row["pace"],
        versions=versions,
    )

"""Facts about the health of a run, read from its ledgers' files: during the run, after it, after a crash.

Nothing is written, and no query reads more than the latest groups of a run: the costs do not grow with its length.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import Any

import msgspec
from msgspec.structs import replace

from rillflow.dataflow.ledger.database import snapshot
from rillflow.dataflow.ledger.tables import SUM
from rillflow.dataflow.ledger.tasks import NOTES
from rillflow.errors import CorruptData
from rillflow.types import UserError

LATEST = 64  # groups of each ledger whose episodes and samples are read
_MOST_ERRORS = 8
Latest = Sequence[tuple[sqlite3.Connection, str]]  # each ledger with the ids of its latest groups, as JSON
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


def read_ledger_facts(paths: Sequence[Path]) -> LedgerFacts:
    """Read the ledgers of a run as they were last committed. The first one has all versions."""
    try:
        with ExitStack() as stack:
            return _facts([stack.enter_context(snapshot(path)).connection for path in paths])
    except (ValueError, TypeError) as error:
        where = ", ".join(map(str, paths))
        raise CorruptData(f"{where} cannot be read: {error}", "restore the run folder from a copy") from error


def _facts(dbs: Sequence[sqlite3.Connection]) -> LedgerFacts:
    if not dbs:
        return LedgerFacts()
    query = "SELECT key, value FROM meta WHERE key IN ('last_failure', ?)"
    meta = [dict(db.execute(query, (NOTES,)).fetchall()) for db in dbs]
    ends = _all(dbs, "SELECT total(completed), total(failed), max(ended_at) FROM nodes")
    failures = [str(json.loads(found["last_failure"])) for found in meta if "last_failure" in found]
    latest = [(db, _latest_groups(db)) for db in dbs]
    return LedgerFacts(
        groups=_counts(dbs),
        completed=sum(int(completed) for completed, _, _ in ends),
        failed=sum(int(failed) for _, failed, _ in ends),
        counters=dict(sum((Counter(dict(db.execute("SELECT name, value FROM counters"))) for db in dbs), Counter())),
        heads=dict(dbs[0].execute("SELECT name, version FROM policies").fetchall()),
        notes={
            subject: text for found in reversed(meta) for subject, text in json.loads(found.get(NOTES, "{}")).items()
        },
        errors=_errors(dbs),
        nodes=_nodes(dbs),
        samples=dict(_samples(latest)),
        episodes=_episodes(latest),
        last_end=max((end for _, _, end in ends if end is not None), default=None),
        last_failure=failures[0] if failures else "",
    )


def _all(dbs: Iterable[sqlite3.Connection], query: str, *values: str) -> list[sqlite3.Row]:
    """Return the rows of all ledgers."""
    return [row for db in dbs for row in db.execute(query, values)]


def _counts(dbs: Sequence[sqlite3.Connection]) -> dict[str, int]:
    """Return the groups of training by state, and by state and cause."""
    counts: dict[str, int] = {}
    for state, cause, number in _all(dbs, "SELECT state, cause, n FROM tally WHERE lane = 'train'"):
        for name in (state, f"{state}.{cause}") if cause else (state,):
            counts[name] = counts.get(name, 0) + number
    return counts


def _latest_groups(db: sqlite3.Connection) -> str:
    """Return the ids of the latest complete groups of training, as JSON."""
    rows: list[tuple[int, str]] = []
    for state in _ENDED:
        query = "SELECT ord, id FROM groups WHERE lane = 'train' AND state = ? ORDER BY ord DESC LIMIT ?"
        rows += [(row["ord"], row["id"]) for row in db.execute(query, (state, LATEST))]
    return json.dumps([group for _, group in sorted(rows)[-LATEST:]])


def _samples(latest: Latest) -> Iterator[tuple[str, SampleFacts]]:
    found: dict[str, list[sqlite3.Row]] = {}
    for row in [row for db, groups in latest for row in db.execute(_SAMPLES, (groups,))]:
        found.setdefault(row["policy"], []).append(row)
    number = sum(len(json.loads(groups)) for _, groups in latest)
    for policy, rows in found.items():
        rewards, lengths = [row["reward"] for row in rows], [float(row["trained"]) for row in rows]
        yield (
            policy,
            SampleFacts(
                count=len(rows),
                groups=number,
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


def _episodes(latest: Latest) -> EpisodeFacts | None:
    rows = [row for db, groups in latest for row in db.execute(_EPISODES, (groups,))]
    if not rows:
        return None
    names = ("calls", "seconds", "forks", "forwarded", "trained")
    return EpisodeFacts(len(rows), **{name: fmean(float(row[name] or 0.0) for row in rows) for name in names})


def _errors(dbs: Sequence[sqlite3.Connection]) -> list[UserError]:
    """Return the most frequent errors of user code."""
    found: dict[tuple[str, str], UserError] = {}
    for row in _all(dbs, f"SELECT * FROM user_errors ORDER BY n DESC, kind, place LIMIT {_MOST_ERRORS}"):
        known = found.get((row["kind"], row["place"]))
        count = row["n"] + (0 if known is None else known.count)
        found[row["kind"], row["place"]] = UserError(
            kind=row["kind"], where=row["place"], error=row["error"], trace=row["trace"], count=count
        )
    return sorted(found.values(), key=lambda error: -error.count)[:_MOST_ERRORS]


def _nodes(dbs: Sequence[sqlite3.Connection]) -> list[NodeFacts]:
    """Return every node once, with its numbers summed over all ledgers."""
    found: dict[str, NodeFacts] = {}
    for row in _all(dbs, "SELECT * FROM nodes WHERE name != ? ORDER BY seen", SUM):
        node, known = _node(row), found.get(row["name"])
        found[node.name] = node if known is None else _sum_node(known, node)
    return [found[name] for name in sorted(found)]


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


def _sum_node(one: NodeFacts, other: NodeFacts) -> NodeFacts:
    newer = one if one.seen > other.seen else other
    paces = [node.pace for node in (one, other) if node.pace is not None]
    return replace(
        newer,
        completed=one.completed + other.completed,
        failed=one.failed + other.failed,
        pace=fmean(paces) if paces else None,
    )

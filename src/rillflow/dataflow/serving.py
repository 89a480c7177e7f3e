"""What a trainer or a stage is told of its shares: their samples by reference, in the order of the members.

A rank's part is a pure function of the batch's members: every part of the batch is balanced over the ranks by tokens,
on top of the parts before it. Asking again gives the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import groupby

from rillflow.dataflow.database import Database
from rillflow.dataflow.hooks.samplers.token_balanced import partition
from rillflow.types import BatchSample, Row

_COLUMNS = (
    "m.n AS member, m.part, m.head, m.replayed, h.mean, h.std, h.size, s.grp, s.place, s.n, s.policy, s.unit, "
    "s.segment, s.offset, s.length, s.tokens, s.trained, s.oldest, s.reward, s.truncated"
)
_SAMPLES = (
    "JOIN shares h ON h.grp = m.grp AND h.producer = m.producer AND h.stream = ? "
    "JOIN samples s ON s.grp = m.grp AND s.policy = m.producer AND s.trained > 0 "
)
_ORDER = "ORDER BY m.n, s.place, s.n"


def batch_rows(db: Database, batch: str, stream: str, have: int) -> list[sqlite3.Row]:
    """The samples of the batch's members from number `have` on."""
    query = f"SELECT {_COLUMNS} FROM members m {_SAMPLES} WHERE m.batch = ? AND m.n >= ? {_ORDER}"
    return db.all(query, (stream, batch, have))


def stage_rows(db: Database, batch: str, stream: str) -> list[sqlite3.Row]:
    """The samples of the shares that a stage has leased under this batch."""
    members = (
        "(SELECT x.ord AS n, 0 AS part, p.version AS head, 0 AS replayed, b.grp, b.producer FROM stage_shares b "
        "JOIN shares x ON x.grp = b.grp AND x.producer = b.producer AND x.stream = b.stream "
        "JOIN policies p ON p.name = b.producer WHERE b.batch = ? AND b.stream = ?) m"
    )
    return db.all(f"SELECT {_COLUMNS} FROM {members} {_SAMPLES} {_ORDER}", (batch, stream, stream))


def of_rank(rows: Sequence[sqlite3.Row], rank: int, ranks: int) -> list[sqlite3.Row]:
    """One rank's part of these samples, which begin with the batch's first."""
    loads = [0] * ranks
    found: list[sqlite3.Row] = []
    for _, part in groupby(rows, key=lambda row: row["part"]):
        samples = list(part)
        for sample, owner in zip(samples, partition([s["tokens"] for s in samples], ranks, loads), strict=True):
            loads[owner] += sample["tokens"]
            if owner == rank:
                found.append(sample)
    return found


def batch_samples(db: Database, rows: Iterable[sqlite3.Row], stream: str, stages: Sequence[str]) -> list[BatchSample]:
    return [_batch_sample(row, _extra(db, row, stream) if stages else []) for row in rows]


def _extra(db: Database, row: sqlite3.Row, stream: str) -> list[Row]:
    """The rows that stages have added to the sample, in the order of the stages' names."""
    return [
        Row(unit=extra["unit"], segment=extra["segment"], offset=extra["offset"], length=extra["length"])
        for extra in db.all(
            "SELECT * FROM extras WHERE grp = ? AND producer = ? AND stream = ? AND place = ? AND n = ? ORDER BY stage",
            (row["grp"], row["policy"], stream, row["place"], row["n"]),
        )
    ]


def _batch_sample(row: sqlite3.Row, extra: list[Row]) -> BatchSample:
    task = f"{row['grp']}.{row['place']}"
    return BatchSample(
        id=f"{task}.{row['n']}",
        row=Row(unit=row["unit"], segment=row["segment"], offset=row["offset"], length=row["length"]),
        tokens=row["tokens"],
        trained=row["trained"],
        reward=row["reward"],
        group=row["grp"],
        group_mean=row["mean"],
        group_std=row["std"],
        group_size=row["size"],
        staleness=max(0, row["head"] - row["oldest"]),
        truncated=bool(row["truncated"]),
        policy=row["policy"],
        task=task,
        extra=extra,
        replayed=bool(row["replayed"]),
    )

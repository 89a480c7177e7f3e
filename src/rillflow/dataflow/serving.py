"""What a trainer or a stage is told of its shares: their samples by reference, in the order of the members.

A rank's part is a pure function of the batch's members: every part of the batch is balanced over the ranks by tokens,
on top of the parts before it. Asking again gives the same.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean

from msgspec.structs import replace

from rillflow.dataflow.database import Database
from rillflow.dataflow.hooks.samplers.token_balanced import partition
from rillflow.types import BatchSample, Row

Key = tuple[str, int]  # agent, turn
SampleKey = tuple[str, str, int, int]  # group, producer, place, n

_COLUMNS = (  # in the order in which `_batch_sample` takes them apart
    "m.n AS member, m.part, m.head, m.replayed, h.mean, h.std, h.size, s.grp, s.place, s.n, s.policy, s.unit, "
    "s.segment, s.offset, s.length, s.tokens, s.trained, s.oldest, s.reward, s.truncated, s.agent, s.turn"
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


def of_ranks(rows: Sequence[sqlite3.Row], ranks: int) -> list[list[sqlite3.Row]]:
    """Each rank's part of these samples, which begin with the batch's first."""
    loads = [0] * ranks
    found: list[list[sqlite3.Row]] = [[] for _ in range(ranks)]
    for _, part in groupby(rows, key=lambda row: row["part"]):
        samples = list(part)
        for sample, owner in zip(samples, partition([s["tokens"] for s in samples], ranks, loads), strict=True):
            loads[owner] += sample["tokens"]
            found[owner].append(sample)
    return found


def batch_samples(db: Database, rows: Sequence[sqlite3.Row], stream: str, stages: Sequence[str]) -> list[BatchSample]:
    extras = _extras(db, {(row["grp"], row["policy"]) for row in rows}, stream) if stages else {}
    return [_batch_sample(row, extras) for row in rows]


def compared(db: Database, samples: Sequence[BatchSample], grouping: str) -> list[BatchSample]:
    """With the statistics of what each sample is compared with, where that is not all of its policy in its group."""
    if grouping == "policy":
        return list(samples)
    shares = sorted({(sample.group, sample.policy) for sample in samples})
    found = {share: alike(db, *share, grouping) for share in shares}
    return [_comparing(sample, found[sample.group, sample.policy], key_of(sample, grouping)) for sample in samples]


def alike(db: Database, group: str, producer: str, grouping: str) -> dict[Key, list[float]]:
    """The rewards of a producer's samples in a group, by what they are compared with."""
    found: dict[Key, list[float]] = {}
    query = "SELECT reward, agent, turn FROM samples WHERE grp = ? AND policy = ? AND trained > 0 ORDER BY place, n"
    for reward, agent, turn in db.all(query, (group, producer)):
        found.setdefault((agent, turn if grouping == "turn" else 0), []).append(reward)
    return found


def key_of(sample: BatchSample, grouping: str) -> Key:
    return sample.agent, sample.turn if grouping == "turn" else 0


def _comparing(sample: BatchSample, found: Mapping[Key, Sequence[float]], key: Key) -> BatchSample:
    mean, std = spread(found[key])
    number = list(found).index(key)
    return replace(sample, group_mean=mean, group_std=std, group_size=len(found[key]), alike=number)


def spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Their mean and standard deviation, of the rewards as a whole population."""
    mean = fmean(rewards)
    return mean, math.sqrt(fmean((reward - mean) ** 2 for reward in rewards))


def _extras(db: Database, shares: Iterable[tuple[str, str]], stream: str) -> dict[SampleKey, list[Row]]:
    """The rows that stages have added to samples of these shares, in the order of the stages' names."""
    found: dict[SampleKey, list[Row]] = {}
    for group, producer in shares:
        for place, n, unit, segment, offset, length in db.all(
            "SELECT place, n, unit, segment, offset, length FROM extras WHERE grp = ? AND producer = ? AND stream = ? "
            "ORDER BY stage",
            (group, producer, stream),
        ):
            added = found.setdefault((group, producer, place, n), [])
            added.append(Row(unit=unit, segment=segment, offset=offset, length=length))
    return found


def _batch_sample(row: sqlite3.Row, extras: dict[SampleKey, list[Row]]) -> BatchSample:
    # Taken apart at once: a batch has thousands of samples, and asking for each column by its name takes longer.
    member, _, head, replayed, mean, std, size, group, place, n, policy, *rest = row
    unit, segment, offset, length, tokens, trained, oldest, reward, truncated, agent, turn = rest
    task = f"{group}.{place}"
    return BatchSample(
        id=f"{task}.{n}",
        row=Row(unit=unit, segment=segment, offset=offset, length=length),
        tokens=tokens,
        trained=trained,
        reward=reward,
        group=group,
        group_mean=mean,
        group_std=std,
        group_size=size,
        staleness=head - oldest if head > oldest else 0,
        truncated=truncated != 0,
        policy=policy,
        task=task,
        extra=extras.get((group, policy, place, n), []) if extras else [],
        replayed=replayed != 0,
        member=member,
        agent=agent,
        turn=turn,
    )

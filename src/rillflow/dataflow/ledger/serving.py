"""The samples of a batch as a trainer or a stage gets them: by reference, in the order of the members.

A rank's part is a pure function of the batch's members: every part of the batch is balanced over the ranks by tokens,
on top of the parts before it. Asking again gives the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from msgspec.structs import replace

from rillflow.dataflow.ledger.database import Database
from rillflow.dataflow.ledger.tables import Record
from rillflow.dataflow.rules import Rules
from rillflow.types import BatchSample, Row

Key = tuple[str, int, int]  # agent, turn, place
SampleKey = tuple[str, str, int, int]  # group, producer, place, n


class ServedSample(Record, frozen=True):
    """A sample of a batch's member, with the statistics of its share."""

    member: int
    part: int
    head: int
    replayed: int
    mean: float
    std: float
    size: int
    grp: str
    place: int
    n: int
    policy: str
    unit: str
    segment: int
    offset: int
    length: int
    tokens: int
    trained: int
    oldest: int
    reward: float
    truncated: int
    agent: str
    turn: int


_COLUMNS = (
    "m.n, m.part, m.head, m.replayed, h.mean, h.std, h.size, s.grp, s.place, s.n, s.policy, s.unit, s.segment, "
    "s.offset, s.length, s.tokens, s.trained, s.oldest, s.reward, s.truncated, s.agent, s.turn"
)
_SAMPLES = (
    "JOIN shares h ON h.grp = m.grp AND h.producer = m.producer AND h.stream = ? "
    "JOIN samples s ON s.grp = m.grp AND s.policy = m.producer AND s.trained > 0 "
)
_ORDER = "ORDER BY m.n, s.place, s.n"


def batch_rows(db: Database, batch: str, stream: str, have: int) -> list[ServedSample]:
    """The samples of the batch's members from number `have` on."""
    query = f"SELECT {_COLUMNS} FROM members m {_SAMPLES} WHERE m.batch = ? AND m.n >= ? {_ORDER}"
    return db.rows(ServedSample, query, (stream, batch, have))


def stage_rows(db: Database, batch: str, stream: str) -> list[ServedSample]:
    """The samples of the shares that a stage has leased under this batch."""
    members = (
        "(SELECT x.ord AS n, 0 AS part, p.version AS head, 0 AS replayed, b.grp, b.producer FROM stage_shares b "
        "JOIN shares x ON x.grp = b.grp AND x.producer = b.producer AND x.stream = b.stream "
        "JOIN policies p ON p.name = b.producer WHERE b.batch = ? AND b.stream = ?) m"
    )
    query = f"SELECT {_COLUMNS} FROM {members} {_SAMPLES} {_ORDER}"
    return db.rows(ServedSample, query, (batch, stream, stream))


def of_ranks(rows: Sequence[ServedSample], ranks: int) -> list[list[ServedSample]]:
    """Each rank's part of these samples, which begin with the batch's first."""
    loads = [0] * ranks
    found: list[list[ServedSample]] = [[] for _ in range(ranks)]
    for _, part in groupby(rows, key=lambda row: row.part):
        samples = list(part)
        for sample, owner in zip(samples, partition([s.tokens for s in samples], ranks, loads), strict=True):
            loads[owner] += sample.tokens
            found[owner].append(sample)
    return found


def served(db: Database, rows: Sequence[ServedSample], stream: str, rules: Rules) -> list[BatchSample]:
    """Return the samples as a trainer or a stage gets them, with what stages have added to them."""
    extras = _extras(db, {(row.grp, row.policy) for row in rows}, stream) if rules.policies[stream].stages else {}
    return _compared(db, [_batch_sample(row, extras) for row in rows], rules.grouping)


def _compared(db: Database, samples: list[BatchSample], grouping: str) -> list[BatchSample]:
    """With the statistics of what each sample is compared with, where that is not all of its policy in its group."""
    if grouping == "policy":
        return samples
    shares = sorted({(sample.group, sample.policy) for sample in samples})
    found = {share: alike(db, *share, grouping) for share in shares}
    return [_comparing(sample, found[sample.group, sample.policy], _key_of(sample, grouping)) for sample in samples]


def alike(db: Database, group: str, producer: str, grouping: str) -> dict[Key, list[float]]:
    """The rewards of a producer's samples in a group, by what they are compared with."""
    found: dict[Key, list[float]] = {}
    query = (
        "SELECT reward, agent, turn, place FROM samples WHERE grp = ? AND policy = ? AND trained > 0 ORDER BY place, n"
    )
    for reward, agent, turn, place in db.all(query, (group, producer)):
        found.setdefault(_key(agent, turn, place, grouping), []).append(reward)
    return found


def _key_of(sample: BatchSample, grouping: str) -> Key:
    return _key(sample.agent, sample.turn, int(sample.task.rpartition(".")[2]), grouping)


def _key(agent: str, turn: int, place: int, grouping: str) -> Key:
    """Return what samples with this key have in common; 0 stands for what `grouping` does not look at."""
    return agent, turn if grouping in ("turn", "state") else 0, place if grouping == "state" else 0


def _comparing(sample: BatchSample, found: Mapping[Key, Sequence[float]], key: Key) -> BatchSample:
    mean, std = spread(found[key])
    number = list(found).index(key)
    return replace(sample, group_mean=mean, group_std=std, group_size=len(found[key]), alike=number)


def spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Their mean and standard deviation, of the rewards as a whole population."""
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum([(reward - mean) ** 2 for reward in rewards]) / len(rewards))


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


def _batch_sample(row: ServedSample, extras: dict[SampleKey, list[Row]]) -> BatchSample:
    task = f"{row.grp}.{row.place}"
    return BatchSample(
        id=f"{task}.{row.n}",
        row=Row(unit=row.unit, segment=row.segment, offset=row.offset, length=row.length),
        tokens=row.tokens,
        trained=row.trained,
        reward=row.reward,
        group=row.grp,
        group_mean=row.mean,
        group_std=row.std,
        group_size=row.size,
        staleness=row.head - row.oldest if row.head > row.oldest else 0,
        truncated=row.truncated != 0,
        policy=row.policy,
        task=task,
        extra=extras.get((row.grp, row.policy, row.place, row.n), []) if extras else [],
        replayed=row.replayed != 0,
        member=row.member,
        agent=row.agent,
        turn=row.turn,
    )


# ---------------------------------------------------------------- the samples of a batch among the ranks of a trainer


def partition(tokens: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Return the rank of each sample, where `loads` are the tokens that the ranks have already: the longest sample goes
    first, to the least loaded rank. The ranks' tokens are within the largest sample of each other, or not further apart
    than `loads` were."""
    if ranks < 1 or len(loads) not in (0, ranks):
        raise ValueError(f"{len(loads)} loads do not fit {ranks} ranks")
    of_sample = [0] * len(tokens)
    heap = [(load, rank) for rank, load in enumerate(loads or [0] * ranks)]
    heapq.heapify(heap)
    for sample in sorted(range(len(tokens)), key=lambda sample: (-tokens[sample], sample)):
        load, rank = heap[0]
        of_sample[sample] = rank
        heapq.heapreplace(heap, (load + tokens[sample], rank))
    return of_sample

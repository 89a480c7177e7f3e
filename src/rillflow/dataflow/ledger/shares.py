"""Shares: the samples of a complete group for one stream. Every move keeps the tally by stream, state and cause exact.

The statistics of a complete group are taken over its episodes. The rows of a share that is `held` may still be asked
for. It gives them up when it has ended and cannot be rolled back; they are released when no share of the same group and
producer holds them any more. `todo` counts the stages that have not handled the share: `stage_shares` says which have
it, or have handled it, and `extras` are the rows that they added.

The only writer of shares, share_tally, stage_shares and extras.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rillflow.dataflow.ledger.database import Base, Database, Part
from rillflow.dataflow.ledger.nodes import Nodes
from rillflow.dataflow.ledger.payload import Samples, Storage
from rillflow.dataflow.ledger.serving import spread
from rillflow.dataflow.ledger.states import MACHINES
from rillflow.dataflow.ledger.tables import Extra, Record, Share, StageBatch
from rillflow.types import Prompt, SampleColumns

# ---------------------------------------------------------------- complete groups


@dataclass(frozen=True)
class CompleteGroup:
    """A complete group, as hooks see it: the episodes in which `policy` has trained tokens, in their places' order."""

    id: str
    prompt: Prompt
    policy: str
    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: Sequence[bool]
    staleness: int
    alike: Sequence[Sequence[float]] = ()  # rewards of what is compared, where that is not all of `rewards`

    @property
    def flat(self) -> bool:
        several = self._several()
        return bool(several) and all(min(rewards) == max(rewards) for rewards in several)

    @property
    def deviation(self) -> float:
        return max((spread(rewards)[1] for rewards in self._several()), default=math.inf)

    def _several(self) -> list[Sequence[float]]:
        return [rewards for rewards in (self.alike or [self.rewards]) if len(rewards) > 1]


class Episode(Record, frozen=True):
    """The samples with trained tokens of one policy in one task, or a single one of them."""

    policy: str
    place: int
    trained: int
    truncated: int
    reward: float
    oldest: int
    newest: int
    tokens: int
    live: int
    samples: int = 1

    @classmethod
    def of(cls, samples: Sequence[Episode]) -> Episode:
        """Return the episode of one task that has these samples."""
        if len(samples) == 1:
            return samples[0]
        return cls(
            samples[0].policy,
            samples[0].place,
            trained=sum(sample.trained for sample in samples),
            truncated=max(sample.truncated for sample in samples),
            reward=sum(sample.reward for sample in samples) / len(samples),
            oldest=min(sample.oldest for sample in samples),
            newest=max(sample.newest for sample in samples),
            tokens=sum(sample.tokens for sample in samples),
            live=min(sample.live for sample in samples),
            samples=len(samples),
        )


_SAMPLES = (
    "SELECT policy, place, trained, truncated, reward, oldest, newest, tokens, live FROM samples "
    "WHERE grp = ? AND trained > 0 ORDER BY place, n"
)


def episodes_of(db: Database, group: str) -> dict[str, list[Episode]]:
    """Return the episodes of a group by the policy that has sampled them, in the order of their places."""
    samples: dict[tuple[str, int], list[Episode]] = {}
    for sample in db.rows(Episode, _SAMPLES, (group,)):
        samples.setdefault((sample.policy, sample.place), []).append(sample)
    episodes: dict[str, list[Episode]] = {}
    for (policy, _), found in samples.items():
        episodes.setdefault(policy, []).append(Episode.of(found))
    return episodes


@dataclass(frozen=True)
class Statistics:
    """A producer's part in a complete group."""

    oldest: int
    newest: int
    mean: float
    std: float
    size: int
    samples: int
    tokens: int


def statistics_of(episodes: Sequence[Episode]) -> Statistics:
    rewards = [episode.reward for episode in episodes]
    mean, std = spread(rewards)
    return Statistics(
        oldest=min(episode.oldest for episode in episodes),
        newest=max(episode.newest for episode in episodes),
        mean=mean,
        std=std,
        size=len(rewards),
        samples=sum(episode.samples for episode in episodes),
        tokens=sum(episode.tokens for episode in episodes),
    )


# ---------------------------------------------------------------- shares

Key = tuple[str, str, str]  # group, producer, stream
SampleKey = tuple[str, str, int, int]  # group, producer, place, n
ENTERED = "samples.entered"  # the counter of samples that passed the filters
_KEY = "grp = ? AND producer = ? AND stream = ?"
_SHARE = f"SELECT {Share.columns()} FROM shares"
_SERVED = (
    "UPDATE shares SET served = served + ? FROM members m WHERE m.batch = ? AND shares.grp = m.grp "
    "AND shares.producer = m.producer AND shares.stream = ?"
)
_ENDED = MACHINES["shares"].ends


class Shares(Part):
    def __init__(self, base: Base, samples: Samples, nodes: Nodes, storage: Storage) -> None:
        super().__init__(base)
        self._samples = samples
        self._nodes = nodes
        self._storage = storage
        self._tallies = self._db.totals("share_tally", 3)
        self.moves = 0  # since the ledger was opened: a hint that something may follow, not a state

    # ------------------------------------------------------------ counting and finding

    def count(self, stream: str, *states: str) -> int:
        sums = self._tallies.sums()
        return sum([n for (of, state, _), n in sums.items() if of == stream and state in states])

    def _tally(self, stream: str, state: str, cause: str, by: int) -> None:
        self.moves += 1
        self._tallies.add(by, stream, state, cause)

    def of(self, group: str) -> list[Share]:
        return self._db.rows(Share, f"{_SHARE} WHERE grp = ?", (group,))

    def ends(self, groups: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        """Return the states and causes of all shares of these groups."""
        found: dict[str, list[tuple[str, str]]] = {}
        for group, state, cause in self._db.all(
            "SELECT h.grp, h.state, h.cause FROM json_each(?) j JOIN shares h ON h.grp = j.value "
            "ORDER BY h.grp, h.producer, h.stream",
            (json.dumps(groups),),
        ):
            found.setdefault(group, []).append((state, cause))
        return found

    def find(self, key: Key) -> Share | None:
        return self._db.row(Share, f"{_SHARE} WHERE {_KEY}", key)

    def untouched(self, group: str) -> bool:
        """Return whether no stream has, or had, a share of the group: its tasks may be played again."""
        return not any(share.state in ("leased", "trained") for share in self.of(group))

    def gone(self, group: str) -> list[int]:
        """Return the places of the tasks that open shares of the group need, and whose rows are lost or released."""
        return self._db.column(
            "SELECT DISTINCT s.place FROM shares h JOIN samples s ON s.grp = h.grp AND s.policy = h.producer "
            "AND s.trained > 0 WHERE h.grp = ? AND h.state = 'ready' AND (h.held = 0 OR h.damaged = 1) "
            "ORDER BY s.place",
            (group,),
        )

    # ------------------------------------------------------------ moves

    def create(self, key: Key, order: int, state: str, cause: str, of: Statistics) -> None:
        group, producer, stream = key
        ended = state in _ENDED
        self._db.run(
            "INSERT INTO shares (grp, producer, stream, ord, state, cause, oldest, newest, mean, std, size, samples, "
            "tokens, todo, held, ended_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(group, producer, stream, order, state, cause, of.oldest, of.newest, of.mean, of.std, of.size),
                *(of.samples, of.tokens, len(set(self._rules.policies[stream].stages)), not ended),
                self._clock.now() if ended else None,
            ),
        )
        self._tally(stream, state, cause, 1)
        if state == "ready":
            self._db.count(ENTERED, of.samples)

    def end(self, share: Share, state: str, cause: str) -> None:
        """End an open share that is not trained."""
        self._db.run(
            f"UPDATE shares SET state = ?, cause = ?, batch = NULL, ended_at = ? WHERE {_KEY}",
            (state, cause, self._clock.now(), *share.key),
        )
        self._tally(share.stream, share.state, share.cause, -1)
        self._tally(share.stream, state, cause, 1)
        if cause == "stale":
            self._count_stale(share)
        self.let_go([share.key])

    def _count_stale(self, share: Share) -> None:
        """Count samples that came to nothing for their age, by the node that made them."""
        rows = self._db.all(
            "SELECT t.node, count(*) FROM tasks t JOIN samples s ON s.grp = t.grp AND s.place = t.place "
            "WHERE t.grp = ? AND s.policy = ? AND s.trained > 0 GROUP BY t.node",
            (share.grp, share.producer),
        )
        for node, number in rows:
            self._nodes.expired(node, number)

    def lease(self, stream: str, batch: str, members: Sequence[tuple[str, str]]) -> None:
        """Give shares that are ready to a batch, each named by its group and producer."""
        self._db.many(
            f"UPDATE shares SET state = 'leased', batch = ? WHERE {_KEY}",
            [(batch, group, producer, stream) for group, producer in members],
        )
        self._tally(stream, "ready", "", -len(members))
        self._tally(stream, "leased", "", len(members))

    def train(self, stream: str, batch: str, version: int) -> list[str]:
        """Mark the fresh members of a batch as trained; returns their groups."""
        members = self._db.all("SELECT grp, producer FROM members WHERE batch = ? AND replayed = 0", (batch,))
        now = self._clock.now()
        self._db.many(
            f"UPDATE shares SET state = 'trained', trained_into = ?, ended_at = ?, served = served + 1 WHERE {_KEY}",
            [(version, now, group, producer, stream) for group, producer in members],
        )
        self._tally(stream, "leased", "", -len(members))
        self._tally(stream, "trained", "", len(members))
        self._db.run(f"{_SERVED} AND m.replayed = 1", (1, batch, stream))
        return [group for group, _ in members]

    def untrain(self, stream: str, batch: str) -> None:
        """Take back that the members of a batch were served: its version died."""
        self._db.run(_SERVED, (-1, batch, stream))

    def back(self, share: Share) -> None:
        """Make a share ready again whose batch was released, or whose version died: for new stages, too."""
        todo, stages = self._todo(share.stream)
        self._db.run(
            f"UPDATE shares SET state = 'ready', batch = NULL, trained_into = NULL, ended_at = NULL, todo = {todo} "
            f"WHERE {_KEY}",
            (*stages, *share.key),
        )
        self._tally(share.stream, share.state, "", -1)
        self._tally(share.stream, "ready", "", 1)

    def remove(self, share: Share) -> None:
        """Delete a share whose group is played again."""
        self.forget_extras(share.key)
        self._db.run(f"DELETE FROM shares WHERE {_KEY}", share.key)
        self._tally(share.stream, share.state, share.cause, -1)

    def damage(self, key: Key) -> None:
        """Note that rows of a trained share are lost: it is not served again."""
        self._db.run(f"UPDATE shares SET damaged = 1 WHERE {_KEY}", key)

    # ------------------------------------------------------------ rows

    def let_go(self, keys: Sequence[Key]) -> None:
        """Note that these shares' rows will not be read again."""
        self._db.many(f"UPDATE shares SET held = 0 WHERE {_KEY}", keys)
        for key in keys:
            if self._rules.policies[key[2]].stages:
                self.forget_extras(key)
        parts = list(dict.fromkeys((group, producer) for group, producer, _ in keys))
        if len(self._rules.policies) > 1:  # another stream may hold them
            still = self._db.all(
                "SELECT DISTINCT h.grp, h.producer FROM json_each(?) j JOIN shares h ON h.grp = j.value ->> 0 "
                "AND h.producer = j.value ->> 1 WHERE h.held = 1",
                (json.dumps(parts),),
            )
            held = {(group, producer) for group, producer in still}
            parts = [part for part in parts if part not in held]
        self._samples.release_parts(parts)

    def let_go_of_trained(self, stream: str, restorable: int, pool: int) -> None:
        """Let go of what went into a version that is never gone behind, except the latest `pool` shares."""
        query = "SELECT count(*) FROM shares WHERE stream = ? AND state = 'trained' AND held = 1"
        kept = self._db.value(query, (stream,))
        if kept <= pool:
            return
        rows = self._db.all(
            "SELECT grp, producer FROM shares WHERE stream = ? AND state = 'trained' AND held = 1 "
            "AND trained_into <= ? ORDER BY trained_into, ord LIMIT ?",
            (stream, restorable, kept - pool),
        )
        if rows:
            self.let_go([(group, producer, stream) for group, producer in rows])

    # ------------------------------------------------------------ stages

    def count_stages(self, stream: str) -> None:
        """Let what waits for the stream's trainer wait for its present stages: a resumed run may have others."""
        todo, stages = self._todo(stream)
        self._db.run(f"UPDATE shares SET todo = {todo} WHERE stream = ? AND state = 'ready'", (*stages, stream))

    def unhandled(self, stream: str, batch: str) -> bool:
        """Return whether a stage has not handled all that the stream's trainer holds."""
        todo, stages = self._todo(stream)
        query = f"SELECT max({todo}) FROM shares WHERE stream = ? AND state = 'leased' AND batch = ?"
        return bool(self._db.value(query, (*stages, stream, batch)))

    def _todo(self, stream: str) -> tuple[str, list[str]]:
        """Return the expression for how many of the stream's stages have not handled a share, and its values."""
        stages = sorted(set(self._rules.policies[stream].stages))
        if not stages:
            return "0", []
        done = (
            "SELECT count(*) FROM stage_shares d WHERE d.grp = shares.grp AND d.producer = shares.producer "
            f"AND d.stream = shares.stream AND d.state = 'done' AND d.stage IN ({','.join('?' * len(stages))})"
        )
        return f"{len(stages)} - ({done})", stages

    def lease_to_stage(self, batch: str, stream: str, stage: str, members: Iterable[tuple[str, str]]) -> None:
        """Give shares to a worker of a stage, each named by its group and producer."""
        self._db.many(
            "INSERT INTO stage_shares VALUES (?, ?, ?, ?, 'leased', ?)",
            [(group, producer, stream, stage, batch) for group, producer in members],
        )

    def return_from_stage(self, batch: str) -> None:
        """Take back what a worker of a stage holds."""
        self._db.run("DELETE FROM stage_shares WHERE batch = ? AND state = 'leased'", (batch,))
        self.moves += 1  # other workers of the stage may get them now

    def handled(self, batch: StageBatch, columns: dict[SampleKey, SampleColumns]) -> None:
        """Write down that a stage has handled what it holds, and the columns that it added."""
        self._db.run(
            "UPDATE shares SET todo = todo - 1 FROM stage_shares d WHERE d.batch = ? AND d.state = 'leased' "
            "AND shares.grp = d.grp AND shares.producer = d.producer AND shares.stream = d.stream",
            (batch.id,),
        )
        self._db.many(
            "INSERT INTO extras VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (group, producer, batch.stream, batch.stage, place, n, at.unit, at.segment, at.offset, at.length)
                for (group, producer, place, n), at in ((key, column.row) for key, column in columns.items())
            ],
        )
        self._db.run("UPDATE stage_shares SET state = 'done' WHERE batch = ?", (batch.id,))
        self.moves += 1  # more shares may wait for the trainer now

    def handled_by(self, key: Key, stage: str) -> bool:
        """Return whether the stage has, or has handled, the share."""
        return bool(self._db.value(f"SELECT 1 FROM stage_shares WHERE {_KEY} AND stage = ?", (*key, stage)))

    def redo(self, extra: Extra) -> None:
        """Let the stage handle a share that is ready again: a row that it added was lost."""
        key = (extra.grp, extra.producer, extra.stream)
        self.forget_extras(key, extra.stage)
        self._db.run(f"UPDATE shares SET todo = todo + 1 WHERE {_KEY}", key)

    def forget_extras(self, key: Key, stage: str | None = None) -> None:
        """Delete what stages, or this one, have done to a share."""
        where, values = (_KEY, list(key)) if stage is None else (f"{_KEY} AND stage = ?", [*key, stage])
        rows = self._db.all(f"DELETE FROM extras WHERE {where} RETURNING unit, segment", values)
        self._storage.let_go((*place, number) for place, number in Counter(map(tuple, rows)).items())
        self._db.run(f"DELETE FROM stage_shares WHERE {where}", values)

"""Shares: what a complete group gives to a stream. Every move keeps the tally by stream, state and cause exact.

The rows of a share that is `held` may still be asked for. It lets go of them when it has ended for good; they are
released when no share of the same group and producer holds them any more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.dataflow.balance import SUM
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rows import Rows
from rillflow.dataflow.tables import SHARE_ENDED

_KEY = "grp = ? AND producer = ? AND stream = ?"


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


class Shares(Part):
    def __init__(self, base: Base, rows: Rows) -> None:
        super().__init__(base)
        self._rows = rows
        self.moves = 0  # since the ledger was opened: a hint that something may follow, not a state

    # ------------------------------------------------------------ counting

    def count(self, stream: str, *states: str) -> int:
        marks = ",".join("?" * len(states))
        query = f"SELECT ifnull(sum(n), 0) FROM share_tally WHERE stream = ? AND state IN ({marks})"
        return int(self._db.value(query, (stream, *states)))

    def _tally(self, stream: str, state: str, cause: str, by: int) -> None:
        self.moves += 1
        self._db.run(
            "INSERT INTO share_tally VALUES (?, ?, ?, ?) "
            "ON CONFLICT (stream, state, cause) DO UPDATE SET n = n + excluded.n",
            (stream, state, cause, by),
        )

    # ------------------------------------------------------------ finding

    def of(self, group: str) -> list[sqlite3.Row]:
        return self._db.all("SELECT * FROM shares WHERE grp = ?", (group,))

    def one(self, group: str, producer: str, stream: str) -> sqlite3.Row:
        row = self._db.one(f"SELECT * FROM shares WHERE {_KEY}", (group, producer, stream))
        assert row is not None, (group, producer, stream)
        return row

    def untouched(self, group: str) -> bool:
        """Whether no stream has, or had, a share of the group: its tasks may be played again."""
        return not any(row["state"] in ("leased", "trained") for row in self.of(group))

    def gone(self, group: str) -> list[int]:
        """The places of the tasks that open shares of the group need, and whose rows are lost or released."""
        rows = self._db.all(
            "SELECT DISTINCT s.place FROM shares h JOIN samples s ON s.grp = h.grp AND s.policy = h.producer "
            "AND s.trained > 0 WHERE h.grp = ? AND h.state = 'ready' AND (h.held = 0 OR h.damaged = 1) "
            "ORDER BY s.place",
            (group,),
        )
        return [row["place"] for row in rows]

    # ------------------------------------------------------------ moves

    def create(self, key: tuple[str, str, str], order: int, state: str, cause: str, of: Statistics) -> None:
        group, producer, stream = key
        ended = state in SHARE_ENDED
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
            self._db.count("samples.entered", of.samples)

    def end(self, row: sqlite3.Row, state: str, cause: str) -> None:
        """An open share ends without being trained."""
        key = (row["grp"], row["producer"], row["stream"])
        self._db.run(
            f"UPDATE shares SET state = ?, cause = ?, batch = NULL, ended_at = ? WHERE {_KEY}",
            (state, cause, self._clock.now(), *key),
        )
        self._tally(row["stream"], row["state"], row["cause"], -1)
        self._tally(row["stream"], state, cause, 1)
        if cause == "stale":
            self._blame(row["grp"], row["producer"])
        self.let_go(*key)

    def _blame(self, group: str, producer: str) -> None:
        """Samples that came to nothing for their age, by the node that made them."""
        self._db.run(
            "UPDATE nodes SET stale = stale + n FROM (SELECT ifnull(k.name, ?) AS node, count(*) AS n FROM tasks t "
            "JOIN samples s ON s.grp = t.grp AND s.place = t.place LEFT JOIN nodes k ON k.name = t.node "
            "WHERE t.grp = ? AND s.policy = ? AND s.trained > 0 GROUP BY 1) AS found WHERE nodes.name = found.node",
            (SUM, group, producer),
        )

    def lease(self, stream: str, batch: str, members: Sequence[tuple[str, str]]) -> None:
        self._db.many(
            f"UPDATE shares SET state = 'leased', batch = ? WHERE {_KEY}",
            [(batch, group, producer, stream) for group, producer in members],
        )
        self._tally(stream, "ready", "", -len(members))
        self._tally(stream, "leased", "", len(members))

    def train(self, stream: str, batch: str, version: int) -> list[str]:
        """The fresh members of a batch are trained; returns their groups."""
        members = self._db.all("SELECT grp, producer FROM members WHERE batch = ? AND replayed = 0", (batch,))
        self._db.many(
            f"UPDATE shares SET state = 'trained', trained_into = ?, ended_at = ? WHERE {_KEY}",
            [(version, self._clock.now(), row["grp"], row["producer"], stream) for row in members],
        )
        self._tally(stream, "leased", "", -len(members))
        self._tally(stream, "trained", "", len(members))
        return [row["grp"] for row in members]

    def back(self, row: sqlite3.Row) -> None:
        """A share whose batch was released, or whose version died, is ready again: for stages that came since, too."""
        todo, stages = self._todo(row["stream"])
        self._db.run(
            f"UPDATE shares SET state = 'ready', batch = NULL, trained_into = NULL, ended_at = NULL, todo = {todo} "
            f"WHERE {_KEY}",
            (*stages, row["grp"], row["producer"], row["stream"]),
        )
        self._tally(row["stream"], row["state"], "", -1)
        self._tally(row["stream"], "ready", "", 1)

    def count_stages(self, stream: str) -> None:
        """A resumed run may have other stages: what waits for the stream's trainer waits for those."""
        todo, stages = self._todo(stream)
        self._db.run(f"UPDATE shares SET todo = {todo} WHERE stream = ? AND state = 'ready'", (*stages, stream))

    def unhandled(self, stream: str, batch: str) -> bool:
        """Whether a stage has not handled all that the stream's trainer holds."""
        todo, stages = self._todo(stream)
        query = f"SELECT max({todo}) FROM shares WHERE stream = ? AND state = 'leased' AND batch = ?"
        return bool(self._db.value(query, (*stages, stream, batch)))

    def _todo(self, stream: str) -> tuple[str, list[str]]:
        """How many of the stream's stages have not handled a share: an expression, and the values in it."""
        stages = sorted(set(self._rules.policies[stream].stages))
        if not stages:
            return "0", []
        done = (
            "SELECT count(*) FROM stage_shares d WHERE d.grp = shares.grp AND d.producer = shares.producer "
            f"AND d.stream = shares.stream AND d.state = 'done' AND d.stage IN ({','.join('?' * len(stages))})"
        )
        return f"{len(stages)} - ({done})", stages

    def remove(self, row: sqlite3.Row) -> None:
        """The share has never been: its group is played again."""
        key = (row["grp"], row["producer"], row["stream"])
        self._rows.forget_extras(*key)
        self._db.run(f"DELETE FROM shares WHERE {_KEY}", key)
        self._tally(row["stream"], row["state"], row["cause"], -1)

    # ------------------------------------------------------------ rows

    def let_go(self, group: str, producer: str, stream: str) -> None:
        """Nobody will ask for this share's rows again."""
        self._db.run(f"UPDATE shares SET held = 0 WHERE {_KEY}", (group, producer, stream))
        if self._rules.policies[stream].stages:
            self._rows.forget_extras(group, producer, stream)
        if not self._db.value(
            "SELECT 1 FROM shares WHERE grp = ? AND producer = ? AND held = 1 LIMIT 1", (group, producer)
        ):
            self._rows.release(group, producer)

    def let_go_of_trained(self, stream: str, restorable: int, pool: int) -> None:
        """Rows that went into a version that is never gone behind, except those of the latest `pool` shares."""
        kept = self._db.value(
            "SELECT count(*) FROM shares WHERE stream = ? AND state = 'trained' AND held = 1", (stream,)
        )
        if kept <= pool:
            return
        for row in self._db.all(
            "SELECT grp, producer FROM shares WHERE stream = ? AND state = 'trained' AND held = 1 "
            "AND trained_into <= ? ORDER BY trained_into, ord LIMIT ?",
            (stream, restorable, kept - pool),
        ):
            self.let_go(row["grp"], row["producer"], stream)

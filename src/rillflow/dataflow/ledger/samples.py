"""Samples: what the ledger knows of each, and whether its payload's row may still be asked for (`live`).

Every live sample counts in the segment that has its row. The only writer of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rillflow.dataflow.ledger.completions import Verdict
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.segments import Storage
from rillflow.dataflow.ledger.tables import Task


class Samples(Part):
    def __init__(self, base: Base, storage: Storage, playing: Playing) -> None:
        super().__init__(base)
        self._storage = storage
        self._playing = playing

    def add(self, ends: Sequence[tuple[Task, Verdict]]) -> None:
        """Write the samples of completed tasks. Their segments have counted them already."""
        self._db.many(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [values for task, one in ends for values in _values(task, one)],
        )
        for task, one in ends:
            if task.lane == "train":
                for sample in one.news.samples:
                    if sample.trained:
                        self._playing.note_versions(task.grp, sample.policy, sample.oldest, sample.newest)

    def reward(self, group: str, place: int, reward: float) -> None:
        self._db.run("UPDATE samples SET reward = ? WHERE grp = ? AND place = ?", (reward, group, place))

    def release(self, group: str, producer: str | None = None) -> None:
        """Release the rows of this group, or of this producer in it: they will not be read again."""
        where, values = ("grp = ?", (group,)) if producer is None else ("grp = ? AND policy = ?", (group, producer))
        self._storage.let_go(self._release(where, [values]))

    def release_parts(self, parts: Iterable[tuple[str, str]]) -> None:
        """Release the rows of many groups and producers at once."""
        self._storage.let_go(self._release("grp = ? AND policy = ?", parts))

    def _release(self, where: str, parts: Iterable[tuple[str, ...]]) -> list[tuple[str, int, int]]:
        """Mark samples as released; return the units and segments of their rows with the number in each."""
        statement = f"UPDATE samples SET live = 0 WHERE {where} AND live = 1 RETURNING unit, segment"
        rows = Counter((unit, segment) for part in parts for unit, segment in self._db.all(statement, part))
        return [(*place, number) for place, number in rows.items()]

    def forget(self, group: str, place: int) -> None:
        """Delete the samples of a task."""
        query = "SELECT unit, segment, count(*) FROM samples WHERE grp = ? AND place = ? AND live = 1 GROUP BY 1, 2"
        self._storage.let_go(tuple(row) for row in self._db.all(query, (group, place)))
        self._db.run("DELETE FROM samples WHERE grp = ? AND place = ?", (group, place))


def _values(task: Task, one: Verdict) -> Iterator[tuple[str | int | float, ...]]:
    for n, (sample, live) in enumerate(zip(one.news.samples, one.live, strict=True)):
        at = sample.row
        yield (
            *(task.grp, task.place, n, sample.policy, at.unit, at.segment, at.offset, at.length, sample.tokens),
            *(sample.trained, sample.oldest, sample.newest, sample.reward, sample.truncated, live),
            *(sample.agent, sample.turn),
        )

"""The payload that the ledger knows of: storage units, their segments, the samples whose rows are in them, and losses.

Every sample that is `live`, and every row that a stage has added to one, counts in its segment's `live`: its row may
still be asked for. A segment whose count has been 0 for `drop_after` seconds is dropped, and nothing that refers to it
is accepted from then on. A node that dies between its put and its report leaves rows without a sample. A segment that
its unit found, and no completion named, is dropped like the others, but not while a task or a stage batch is held that
was leased before it was found.

Rows that cannot be read as they were written, or whose unit is gone, are set aside. Where no stream has trained on
their group, the episodes are played again; where one has, what the other streams would have got expires. Rows of what
is trained are only noted: a rollback plays their episodes again, and no replayer gets them.

`Storage` is the only writer of units, segments and quarantine, `Samples` of samples; `LostRows` writes no table itself.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from rillflow.dataflow.ledger.attempts import Verdict
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.tables import NEWEST, Extra, Sample, Share, Task
from rillflow.errors import BadRequest
from rillflow.types import Row, UnitInfo
from rillflow.types.base import json_decoder

if TYPE_CHECKING:
    from rillflow.dataflow.ledger.batches import Batches
    from rillflow.dataflow.ledger.groups import Groups
    from rillflow.dataflow.ledger.shares import Key, Shares

# ---------------------------------------------------------------- segments

RECLAIMED = "segments_reclaimed"  # the counter of segments that were dropped unreported
_MOST_IDLE = 1000  # that a unit is asked about at once
_TAKE = (
    "UPDATE segments SET live = live + ?, touched = ?, unreported = NULL "
    "WHERE unit = ? AND segment = ? AND state = 'live' "
    "AND EXISTS (SELECT 1 FROM units WHERE units.unit = segments.unit AND units.state = 'healthy')"
)
_KNOW = (
    "INSERT OR IGNORE INTO segments (unit, segment, live, touched) "
    "SELECT ?1, ?2, ?3, ?4 FROM units WHERE unit = ?1 AND state = 'healthy'"
)
_OLDEST_TASK = (
    "SELECT min(t.leased_at) FROM groups g JOIN tasks t ON t.grp = g.id WHERE g.lane IN ('train', 'eval') "
    "AND g.state = 'playing' AND t.state = 'leased'"
)
_OLDEST_STAGE_BATCH = "SELECT min(CAST(substr(id, 2) AS INTEGER)) FROM stage_batches WHERE state = 'leased'"
DAMAGED, UNIT_GONE = "damaged", "unit_gone"
# Live samples belong to groups that play, that have a share whose rows are held, or that a running round evaluates.
_LIVE = (
    "SELECT id AS grp FROM groups WHERE lane = 'train' AND state = 'playing' "
    "UNION SELECT grp FROM shares WHERE state = 'ready' UNION SELECT grp FROM shares WHERE state = 'leased' "
    "UNION SELECT grp FROM shares WHERE state = 'trained' AND held = 1 "
    "UNION SELECT g.id FROM groups g JOIN rounds r ON r.id = g.round WHERE g.lane = 'eval' AND r.state = 'running'"
)


class Storage(Part):
    """Storage units and their segments."""

    def hear(self, info: UnitInfo) -> None:
        if not info.unit or len(info.unit) > 200:
            raise BadRequest("a unit's name has 1 to 200 characters", "a unit draws its name once and keeps it")
        if not math.isfinite(info.load):
            raise BadRequest(f"the load of unit {info.unit!r:.80} is {info.load}", "a unit's load is its waiting bytes")
        self._db.run(
            "INSERT INTO units VALUES (?, ?, ?, ?, 'healthy') ON CONFLICT (unit) DO UPDATE SET info = excluded.info, "
            "load = excluded.load, seen = excluded.seen, state = 'healthy'",
            (info.unit, msgspec.json.encode(info).decode(), info.load, self._clock.now()),
        )

    def grace(self) -> None:
        """Give healthy units and idle segments their full time again."""
        now = self._clock.now()
        self._db.run("UPDATE units SET seen = ? WHERE state = 'healthy'", (now,))
        self._db.run("UPDATE segments SET touched = ? WHERE state = 'live' AND live = 0", (now,))

    def healthy(self) -> list[UnitInfo]:
        """Return the units that were heard of lately, the least loaded first."""
        found = self._db.column("SELECT info FROM units WHERE state = 'healthy' ORDER BY load, unit")
        return [json_decoder(UnitInfo).decode(info) for info in found]

    @property
    def count(self) -> int:
        return int(self._db.value("SELECT count(*) FROM units WHERE state = 'healthy'"))

    @property
    def seen(self) -> float | None:
        """When a unit was heard of last, or None if none ever was."""
        found: float | None = self._db.value("SELECT max(seen) FROM units")
        return found

    def silent(self) -> list[str]:
        """Mark the units that were not heard of for too long as gone; returns their names."""
        names: list[str] = self._db.column(
            "SELECT unit FROM units WHERE state = 'healthy' AND seen < ?",
            (self._clock.now() - self._rules.unit_timeout,),
        )
        self._db.many("UPDATE units SET state = 'gone' WHERE unit = ?", [(name,) for name in names])
        return names

    # ------------------------------------------------------------ rows that are needed

    def take(self, rows: Iterable[Row]) -> bool:
        """Count the rows as needed; False, changing nothing, when one lies where nothing can be read any more."""
        wanted: dict[tuple[str, int], int] = {}
        for row in rows:
            place = (row.unit, row.segment)
            wanted[place] = wanted.get(place, 0) + 1
        now = self._clock.now()
        taken: list[tuple[str, int, int]] = []
        for place, number in wanted.items():
            if not (self._db.run(_TAKE, (number, now, *place)) or self._db.run(_KNOW, (*place, number, now))):
                self.let_go(taken)
                return False
            taken.append((*place, number))
        return True

    def let_go(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Count rows as needed no more, given units, segments and how many."""
        now = self._clock.now()
        self._db.many(
            "UPDATE segments SET live = live - ?, touched = ? WHERE unit = ? AND segment = ?",
            [(number, now, unit, segment) for unit, segment, number in rows],
        )

    def note(self, rows: Iterable[Row]) -> None:
        """Note the segments of rows that will not be read, so that they are dropped in time."""
        now = self._clock.now()
        self._db.many(_KNOW, [(*place, 0, now) for place in {(row.unit, row.segment) for row in rows}])

    def quarantine(self, row: Row, sample: str, reason: str) -> int:
        """Set a row aside that could not be read as it was written; returns 0 for one that is known."""
        return self._db.run(
            "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?)",
            (row.unit, row.segment, row.offset, row.length, sample, reason, self._clock.now()),
        )

    # ------------------------------------------------------------ dropping

    def found(self, unit: str, segments: Sequence[int]) -> None:
        """Watch the unit's closed segments of which no row was reported."""
        numbers = json.dumps([segment for segment in segments if 0 <= segment <= NEWEST])
        self._db.run(
            "INSERT OR IGNORE INTO segments (unit, segment, live, touched, unreported) "
            "SELECT ?, j.value, 0, ?, ? FROM json_each(?) j",
            (unit, self._clock.now(), self._db.counter("stage_batches"), numbers),
        )

    def idle(self, unit: str) -> list[int]:
        """Return the segments that have been idle for a while. A writer may still hold them open."""
        rows = self._db.all(
            "SELECT segment, touched, unreported FROM segments WHERE unit = ? AND state = 'live' AND live = 0 "
            "AND touched < ? ORDER BY segment LIMIT ?",
            (unit, self._clock.now() - self._rules.drop_after, _MOST_IDLE),
        )
        if all(unreported is None for _, _, unreported in rows):
            return [segment for segment, _, _ in rows]
        task, stage = self._db.value(_OLDEST_TASK), self._db.value(_OLDEST_STAGE_BATCH)
        return [
            segment
            for segment, touched, unreported in rows
            if unreported is None or ((task is None or touched < task) and (stage is None or unreported <= stage))
        ]

    def closed(self, unit: str, segments: Sequence[int]) -> None:
        """Drop the segments that are closed and still idle."""
        idle = set(self.idle(unit))
        self._db.many(
            "UPDATE segments SET state = 'dropping' WHERE unit = ? AND segment = ?",
            [(unit, segment) for segment in segments if segment in idle],
        )

    def dropping(self, unit: str) -> list[int]:
        query = "SELECT segment FROM segments WHERE unit = ? AND state = 'dropping' ORDER BY segment"
        return self._db.column(query, (unit,))

    def dropped(self, unit: str, segments: Sequence[int]) -> None:
        for segment in segments:
            where = "unit = ? AND segment = ? AND state = 'dropping'"
            if self._db.value(f"SELECT unreported FROM segments WHERE {where}", (unit, segment)) is not None:
                self._db.count(RECLAIMED)
            self._db.run(f"UPDATE segments SET state = 'dropped' WHERE {where}", (unit, segment))


# ---------------------------------------------------------------- samples


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
                for versions in {(s.policy, s.oldest, s.newest) for s in one.news.samples if s.trained}:
                    self._playing.note_versions(task.grp, *versions)

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


# ---------------------------------------------------------------- lost rows


class LostRows(Part):
    def __init__(self, base: Base, groups: Groups, shares: Shares, batches: Batches, storage: Storage) -> None:
        super().__init__(base)
        self._groups = groups
        self._shares = shares
        self._batches = batches
        self._storage = storage

    def lose_rows(self, rows: Sequence[Row], reason: str) -> int:
        """Set these rows aside; returns how many of them anybody might have asked for."""
        samples: list[Sample] = []
        extras: list[Extra] = []
        for row in rows:
            at = (row.unit, row.segment, row.offset)
            where = "unit = ? AND segment = ? AND offset = ?"
            samples += self._samples(where, at)
            extras += self._extras(where, at)
        return self._lose(samples, extras, reason, DAMAGED)

    def lose_unit(self, unit: str) -> int:
        """Set all rows of a unit aside that is gone."""
        self._db.count("units_gone")
        where, reason = "unit = ?", f"unit {unit} was not heard of any more"
        return self._lose(self._samples(where, (unit,)), self._extras(where, (unit,)), reason, UNIT_GONE)

    def _samples(self, where: str, at: tuple[str | int, ...]) -> list[Sample]:
        query = f"SELECT {Sample.columns('s')} FROM ({_LIVE}) g JOIN samples s ON s.grp = g.grp WHERE s.live = 1 AND "
        return self._db.rows(Sample, f"{query} {where} ORDER BY s.grp, s.place, s.n", at)

    def _extras(self, where: str, at: tuple[str | int, ...]) -> list[Extra]:
        return self._db.rows(Extra, f"SELECT {Extra.columns()} FROM extras WHERE {where}", at)

    def _lose(self, samples: Sequence[Sample], extras: Sequence[Extra], reason: str, cause: str) -> int:
        lost_rows: list[Sample | Extra] = [*samples, *extras]
        number = sum(self._storage.quarantine(lost.row, lost.id, reason) for lost in lost_rows)
        if number:
            self._db.count("quarantined", number)
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.grp, []).append(sample)
        for group, lost in groups.items():
            self._lose_samples(group, lost, cause)
        for extra in extras:
            self._lose_extra(extra, cause)
        return number

    def _lose_samples(self, group: str, lost: Sequence[Sample], cause: str) -> None:
        row = self._groups.row(group)
        if row.lane == "eval" and not row.scoring:
            return  # its reward is known
        shares = self._shares.of(group)
        if any(share.state == "trained" for share in shares):
            producers = {sample.policy for sample in lost}
            self._lose_shares([share for share in shares if share.producer in producers], cause)
            self._groups.close(group)
            return
        for batch in sorted({share.batch for share in shares if share.state == "leased" and share.batch}):
            self._batches.release(batch, cause)
        self._groups.rerun(group, sorted({sample.place for sample in lost}), cause)

    def _lose_shares(self, shares: Sequence[Share], cause: str) -> None:
        """Take shares of a group back of which one was trained."""
        for share in shares:
            if share.state == "leased" and share.batch:
                self._batches.release(share.batch, cause)
            now = self._shares.find(share.key)
            if now is not None and now.state == "ready":
                self._shares.end(now, "expired", cause)
            elif now is not None and now.state == "trained":
                self._note(share.key, cause)

    def _note(self, key: Key, cause: str) -> None:
        """Note that rows of a trained share are lost: it is not served again."""
        self._shares.damage(key)
        self._batches.release_replaying(key, cause)

    def _lose_extra(self, extra: Extra, cause: str) -> None:
        """Let the stage handle the share again that it had added this to, unless it was trained or is played again."""
        share = self._shares.find((extra.grp, extra.producer, extra.stream))
        if share is None or not self._shares.handled_by(share.key, extra.stage):
            return
        if share.state == "leased" and share.batch:
            self._batches.release(share.batch, cause)
        if share.state == "trained":
            self._note(share.key, cause)
        else:
            self._shares.redo(extra)

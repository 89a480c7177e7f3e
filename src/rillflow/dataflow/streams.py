"""Streams: which shares a policy's trainer may get now, and how many groups may be on their way to it.

Admission is open while any policy that has steps to do has room, so a slow trainer does not stop a fast one; what is
too much for the slow one expires, the earliest deadline first. Nothing beyond a stream's staleness bound stays open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rillflow.dataflow.groups import POLICY_DONE, Groups
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.rules import PolicyRules
from rillflow.dataflow.shares import Shares
from rillflow.dataflow.tables import NEWEST

SKIPPED_IN_A_ROW = "skipped_in_a_row"  # the counter of prompts that curators passed over since the last admitted one
_MANY_SKIPPED = 1000
_DEAD = "EXISTS (SELECT 1 FROM orphans o WHERE o.policy = s.producer AND o.low < s.newest AND s.oldest <= o.high)"


@dataclass(frozen=True)
class Ready:
    """A share that may be served, as samplers see it."""

    id: str
    order: int
    oldest: int
    staleness: int
    tokens: int
    spread: float
    served: int
    group: str
    producer: str
    head: int
    samples: int


class Streams(Part):
    def __init__(self, base: Base, groups: Groups, shares: Shares, lineage: Lineage) -> None:
        super().__init__(base)
        self._groups = groups
        self._shares = shares
        self._lineage = lineage

    # ------------------------------------------------------------ room

    def outstanding(self, stream: str) -> int:
        """Groups on their way to the stream's trainer."""
        return self._groups.count("train", "playing") + self._shares.count(stream, "ready", "leased")

    def room(self) -> int:
        """How many groups may be admitted now: as many as the emptiest stream has room for."""
        policies, unfinished = self._rules.policies, self._lineage.unfinished()
        return max((policies[name].window - self.outstanding(name) for name in unfinished), default=0)

    def window_end(self, versions: Mapping[str, int]) -> int:
        """The last position whose group may be played now with these versions.

        After a rollback more groups are open than the window has room for: those beyond wait as if not yet admitted.
        """
        return max((self._window_end(name, versions) for name in self._lineage.unfinished()), default=NEWEST)

    def _window_end(self, stream: str, versions: Mapping[str, int]) -> int:
        """What is played with weights that are some versions behind has to be trained so many steps sooner.

        A batch is a version, so what has n batches of groups ahead of it is n versions older when its turn comes,
        however long they take. What would be too old then is not played: it waits for newer weights, and others'
        answers come sooner.
        """
        rules, heads = self._rules.policies[stream], self._lineage.heads
        behind = max((heads[name] - versions.get(name, heads[name]) for name in rules.producers), default=0)
        window = rules.window - max(0, behind) * rules.batch_groups
        if window < 1:
            return -1
        if self.outstanding(stream) <= window:
            return NEWEST  # without looking at each of them: all that are open are within it
        last = self._db.value(
            "SELECT ord FROM (SELECT ord FROM groups WHERE lane = 'train' AND state = 'playing' UNION ALL "
            "SELECT ord FROM shares WHERE stream = ? AND state = 'ready' UNION ALL "
            "SELECT ord FROM shares WHERE stream = ? AND state = 'leased') ORDER BY ord LIMIT 1 OFFSET ?",
            (stream, stream, window - 1),
        )
        return NEWEST if last is None else int(last)

    def fullness(self) -> str:
        """What a node that finds no pending task waits for."""
        parts = [
            f"{self.outstanding(name)} of at most {self._rules.policies[name].window} groups are outstanding"
            + (f" for {name}" if len(self._rules.policies) > 1 else "")
            for name in self._lineage.unfinished()
        ]
        return f"tasks: none is pending, {' and '.join(parts) or 'all steps are done'}{self.skipping()}"

    def skipping(self) -> str:
        """Where curators admit nothing any more, nobody ever gets anything: say so."""
        skipped = self._db.counter(SKIPPED_IN_A_ROW)
        return f"; the last {skipped} prompts were skipped by the curators" if skipped >= _MANY_SKIPPED else ""

    # ------------------------------------------------------------ serving

    def ready(self, stream: str, *, in_order: bool) -> list[Ready]:
        """What may be served, in order of admission; `in_order` without leaving a group out that may come yet."""
        rules = self._rules.policies[stream]
        end = self._window_end(stream, {}) if rules.on_policy else NEWEST
        if in_order:
            end = min(end, self._first_unready(stream))
        heads = self._lineage.heads
        rows = self._db.all(
            "SELECT * FROM shares WHERE stream = ? AND state = 'ready' AND ord <= ? AND todo = 0 ORDER BY ord",
            (stream, end),
        )
        # A version above its policy's is published, but not committed yet: it may still die.
        return [as_ready(row, heads[row["producer"]]) for row in rows if row["newest"] <= heads[row["producer"]]]

    def _first_unready(self, stream: str) -> int:
        """The position before the first group that is playing or in a stage."""
        first = self._db.value(
            "SELECT min(ord) FROM (SELECT min(ord) AS ord FROM groups WHERE lane = 'train' AND state = 'playing' "
            "UNION ALL SELECT min(ord) FROM shares WHERE stream = ? AND state = 'ready' AND todo > 0)",
            (stream,),
        )
        return NEWEST if first is None else int(first) - 1

    def servable(self, stream: str) -> int:
        """Shares that wait for nothing but the trainer."""
        query = "SELECT count(*) FROM shares WHERE stream = ? AND state = 'ready' AND todo = 0"
        return int(self._db.value(query, (stream,)))

    def in_stages(self, stream: str) -> int:
        query = "SELECT count(*) FROM shares WHERE stream = ? AND state = 'ready' AND todo > 0"
        return int(self._db.value(query, (stream,)))

    def pool(self, stream: str, most: int, staleness: int) -> list[Ready]:
        """The latest trained shares whose rows are there and whose tokens are live and young enough."""
        heads = self._lineage.heads
        rows = self._db.all(
            "SELECT * FROM shares s WHERE stream = ? AND state = 'trained' AND held = 1 AND damaged = 0 "
            f"AND NOT {_DEAD} ORDER BY trained_into DESC, ord DESC LIMIT ?",
            (stream, most),
        )
        found = [as_ready(row, heads[row["producer"]]) for row in rows]
        return [share for share in found if share.staleness <= staleness]

    # ------------------------------------------------------------ refusing

    def refuse_stale(self, stream: str, *, between_steps: bool) -> None:
        """Nothing beyond the stream's bound stays open: it expires; on-policy, the tasks are played again.

        While the stream's own trainer is `between_steps`, it has published nothing that it has not committed: what a
        later version of its policy sampled, died. At any other time such a version may be committed in a moment.
        """
        rules, heads = self._rules.policies[stream], self._lineage.heads
        for row in self._refusable(stream, rules):
            head = heads[row["producer"]]
            if head - row["oldest"] > rules.staleness and self._still_ready(row):
                self._refuse_old(rules, row, head)
            if self._still_ready(row):
                own = between_steps and row["producer"] == stream
                self._refuse_dead(row, head if own else NEWEST)
        self._refuse_playing()

    def _refusable(self, stream: str, rules: PolicyRules) -> list[sqlite3.Row]:
        """Ready shares that are too old, or that may have tokens of versions that died."""
        return self._db.all(
            "SELECT s.* FROM shares s JOIN policies p ON p.name = s.producer WHERE s.stream = ? AND s.state = 'ready' "
            f"AND (p.version - s.oldest > ? OR s.newest > p.version OR {_DEAD}) ORDER BY s.ord",
            (stream, rules.staleness),
        )

    def _still_ready(self, row: sqlite3.Row) -> bool:
        """Not when its group is played again for another share's sake."""
        query = "SELECT 1 FROM shares WHERE grp = ? AND producer = ? AND stream = ? AND state = 'ready'"
        return bool(self._db.value(query, (row["grp"], row["producer"], row["stream"])))

    def _refuse_old(self, rules: PolicyRules, row: sqlite3.Row, head: int) -> None:
        if rules.on_policy and self._shares.untouched(row["grp"]):
            self._groups.rerun_sampled(row["grp"], row["producer"], -1, head - 1, "stale")
        else:
            self._shares.end(row, "expired", "stale")
            self._groups.close(row["grp"])

    def _refuse_dead(self, row: sqlite3.Row, newest: int) -> None:
        """Only for tokens of versions that died, or above `newest`: a share whose episodes span them may have none."""
        places = [
            sample["place"]
            for sample in self._db.all(
                "SELECT DISTINCT place FROM samples s WHERE grp = ? AND policy = ? AND trained > 0 AND (newest > ? OR "
                + _DEAD.replace("s.producer", "s.policy")
                + ") ORDER BY place",
                (row["grp"], row["producer"], newest),
            )
        ]
        if self._shares.untouched(row["grp"]):
            self._groups.rerun(row["grp"], places, "rolled_back")
        elif places:
            self._groups.expire_ready(row["grp"], row["producer"], "rolled_back")

    def _refuse_playing(self) -> None:
        """Tasks of playing groups are played again for an on-policy stream; groups that nobody can take expire."""
        heads, unfinished = self._lineage.heads, self._lineage.unfinished()
        wanted = {name: self._rules.policies[name] for name in unfinished}
        for producer, head in heads.items():
            takers = [rules for rules in wanted.values() if producer in rules.producers]
            if not takers:
                continue
            again = any(rules.on_policy for rules in takers)
            limit = head if again else head - max(rules.staleness for rules in takers)
            for row in self._db.all(
                "SELECT v.grp FROM group_versions v JOIN groups g ON g.id = v.grp WHERE v.producer = ? "
                "AND v.oldest < ? ORDER BY g.ord",
                (producer, limit),
            ):
                if again:
                    self._groups.rerun_sampled(row["grp"], producer, -1, head - 1, "stale")
                elif self._doomed(row["grp"], heads, list(wanted.values())):
                    self._groups.end(row["grp"], "expired", "stale")

    def _doomed(self, group: str, heads: dict[str, int], wanted: Sequence[PolicyRules]) -> bool:
        """Whether every share that the group could give is too old already."""
        oldest = {
            row["producer"]: row["oldest"]
            for row in self._db.all("SELECT producer, oldest FROM group_versions WHERE grp = ?", (group,))
        }
        return all(
            producer in oldest and heads[producer] - oldest[producer] > rules.staleness
            for rules in wanted
            for producer in rules.producers
        )

    # ------------------------------------------------------------ too much

    def trim(self) -> None:
        """What is too much for a slow stream expires, and all that a policy which has done its steps has left."""
        if len(self._rules.policies) == 1:
            return  # admission alone bounds it, and what a rollback returned is kept
        unfinished = self._lineage.unfinished()
        for stream, rules in self._rules.policies.items():
            if stream not in unfinished:
                self._expire_first(stream, NEWEST, POLICY_DONE)
            elif (surplus := self._shares.count(stream, "ready") - rules.most_ready) > 0:
                self._expire_first(stream, surplus, "surplus")

    def _expire_first(self, stream: str, most: int, cause: str) -> None:
        for row in self._db.all(
            "SELECT s.* FROM shares s JOIN policies p ON p.name = s.producer WHERE s.stream = ? AND s.state = 'ready' "
            "ORDER BY s.oldest - p.version, s.ord LIMIT ?",
            (stream, most),
        ):
            self._shares.end(row, "expired", cause)
            self._groups.close(row["grp"])


def as_ready(row: sqlite3.Row, head: int) -> Ready:
    return Ready(
        id=f"{row['grp']}/{row['producer']}",
        order=row["ord"],
        oldest=row["oldest"],
        staleness=max(0, head - row["oldest"]),
        tokens=row["tokens"],
        spread=row["std"],
        served=row["served"],
        group=row["grp"],
        producer=row["producer"],
        head=head,
        samples=row["samples"],
    )

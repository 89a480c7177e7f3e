"""Streams: which shares a policy's trainer may get now, and how many groups may be on their way to it.

Admission is open while any policy that has steps to do has room, so a slow trainer does not stop a fast one. Shares
that are too many for the slow one expire, the earliest deadline first. Nothing beyond a stream's staleness bound stays
open.

Writes no table: `groups` and `shares` carry out its decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import POLICY_DONE, Groups
from rillflow.dataflow.ledger.playing import Playing, PlayingGroup
from rillflow.dataflow.ledger.shares import Shares
from rillflow.dataflow.ledger.tables import NEWEST, Share
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.dataflow.rules import PolicyRules

SKIPPED_IN_A_ROW = "skipped_in_a_row"  # the counter of prompts that curators passed over since the last admitted one
ELSEWHERE = "elsewhere"  # the counter of prompts that belong to other ledgers of the run
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
    def __init__(self, base: Base, playing: Playing, groups: Groups, shares: Shares, lineage: Lineage) -> None:
        super().__init__(base)
        self._playing = playing
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
        """Return the position before which a group may be played with these versions, so that it is not too old when it
        is trained.

        A batch is a version: a group that has n batches of groups ahead of it is n versions older when its turn comes,
        however long they take. A group that would be too old then waits for newer weights, and earlier groups end
        sooner.
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
        """Describe what a node waits for when no task is pending."""
        parts = [
            f"{self.outstanding(name)} of at most {self._rules.policies[name].window} groups are outstanding"
            + (f" for {name}" if len(self._rules.policies) > 1 else "")
            for name in self._lineage.unfinished()
        ]
        return f"tasks: none is pending, {' and '.join(parts) or 'all steps are done'}{self.skipping()}"

    def skipping(self) -> str:
        """Describe how many prompts the curators have skipped, if it is many: the run may starve."""
        skipped = self._db.counter(SKIPPED_IN_A_ROW)
        return f"; the last {skipped} prompts were skipped by the curators" if skipped >= _MANY_SKIPPED else ""

    # ------------------------------------------------------------ serving

    def ready(self, stream: str, *, in_order: bool) -> list[Ready]:
        """Return the shares that may be served, in order of admission; `in_order`: none behind a group that plays."""
        rules = self._rules.policies[stream]
        end = self._window_end(stream, {}) if rules.on_policy else NEWEST
        if in_order:
            end = min(end, self._first_unready(stream))
        heads = self._lineage.heads
        shares = self._db.rows(
            Share,
            f"SELECT {Share.columns()} FROM shares WHERE stream = ? AND state = 'ready' AND ord <= ? AND todo = 0 "
            "ORDER BY ord",
            (stream, end),
        )
        # A version above its policy's is published, but not committed yet: it may still die.
        return [as_ready(share, heads[share.producer]) for share in shares if share.newest <= heads[share.producer]]

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

    def behind(self, stream: str) -> dict[str, int]:
        """How many ready groups each stage has not handled yet; stages that have handled all are left out."""
        query = (
            "SELECT count(*) FROM shares s WHERE stream = ? AND state = 'ready' AND todo > 0 AND NOT EXISTS "
            "(SELECT 1 FROM stage_shares d WHERE d.grp = s.grp AND d.producer = s.producer AND d.stream = s.stream "
            "AND d.stage = ? AND d.state = 'done')"
        )
        found = {stage: int(self._db.value(query, (stream, stage))) for stage in self._rules.policies[stream].stages}
        return {stage: groups for stage, groups in found.items() if groups}

    def pool(self, stream: str, most: int, staleness: int) -> list[Ready]:
        """Return the latest trained shares with intact rows and tokens of live, recent versions."""
        heads = self._lineage.heads
        shares = self._db.rows(
            Share,
            f"SELECT {Share.columns('s')} FROM shares s WHERE stream = ? AND state = 'trained' AND held = 1 "
            f"AND damaged = 0 AND NOT {_DEAD} ORDER BY trained_into DESC, ord DESC LIMIT ?",
            (stream, most),
        )
        found = [as_ready(share, heads[share.producer]) for share in shares]
        return [share for share in found if share.staleness <= staleness]

    # ------------------------------------------------------------ refusing

    def refuse_stale(self, stream: str, *, between_steps: bool) -> None:
        """Expire the shares that are older than the stream's bound; on-policy, play their tasks again.

        While the stream's own trainer is `between_steps`, all versions that it has published are committed: samples of
        a later version of its policy died with it. At any other time such a version may be committed in a moment.
        """
        rules, heads = self._rules.policies[stream], self._lineage.heads
        for share in self._refusable(stream, rules):
            head = heads[share.producer]
            if head - share.oldest > rules.staleness and self._still_ready(share):
                self._refuse_old(rules, share, head)
            if self._still_ready(share):
                own = between_steps and share.producer == stream
                self._refuse_dead(share, head if own else NEWEST)
        self._refuse_playing()

    def _refusable(self, stream: str, rules: PolicyRules) -> list[Share]:
        """Return ready shares that are too old, or that may have tokens of versions that died."""
        return self._db.rows(
            Share,
            f"SELECT {Share.columns('s')} FROM shares s JOIN policies p ON p.name = s.producer WHERE s.stream = ? "
            f"AND s.state = 'ready' AND (p.version - s.oldest > ? OR s.newest > p.version OR {_DEAD}) ORDER BY s.ord",
            (stream, rules.staleness),
        )

    def _still_ready(self, share: Share) -> bool:
        """Return False when its group is played again for another share's sake."""
        now = self._shares.find(share.key)
        return now is not None and now.state == "ready"

    def _refuse_old(self, rules: PolicyRules, share: Share, head: int) -> None:
        if rules.on_policy and self._shares.untouched(share.grp):
            self._groups.rerun_sampled(share.grp, share.producer, -1, head - 1, "stale")
        else:
            self._groups.expire(share, "stale")

    def _refuse_dead(self, share: Share, newest: int) -> None:
        """Refuse tokens of versions that died, or above `newest`: a share whose episodes span them may have none."""
        dead = _DEAD.replace("s.producer", "s.policy")
        places = self._db.column(
            "SELECT DISTINCT place FROM samples s WHERE grp = ? AND policy = ? AND trained > 0 "
            f"AND (newest > ? OR {dead}) ORDER BY place",
            (share.grp, share.producer, newest),
        )
        if self._shares.untouched(share.grp):
            self._groups.rerun(share.grp, places, "rolled_back")
        elif places:
            self._groups.expire_ready(share.grp, share.producer, "rolled_back")

    def _refuse_playing(self) -> None:
        """Play tasks of playing groups again for an on-policy stream; expire groups that no stream can take."""
        heads, unfinished = self._lineage.heads, self._lineage.unfinished()
        wanted = {name: self._rules.policies[name] for name in unfinished}
        for producer, head in heads.items():
            takers = [rules for rules in wanted.values() if producer in rules.producers]
            if not takers:
                continue
            again = any(rules.on_policy for rules in takers)
            limit = head if again else head - max(rules.staleness for rules in takers)
            for group in self._playing.sampled(producer, -1, limit - 1):
                if again:
                    self._groups.rerun_sampled(group.id, producer, -1, head - 1, "stale")
                elif _doomed(group, heads, list(wanted.values())):
                    self._groups.end(group.id, "expired", "stale")

    # ------------------------------------------------------------ too much

    def trim(self) -> None:
        """Expire the surplus of slow streams, and all shares of policies that have done their steps."""
        if len(self._rules.policies) == 1:
            return  # admission alone bounds it, and what a rollback returned is kept
        unfinished = self._lineage.unfinished()
        for stream, rules in self._rules.policies.items():
            if stream not in unfinished:
                self._expire_first(stream, NEWEST, POLICY_DONE)
            elif (surplus := self._shares.count(stream, "ready") - rules.most_ready) > 0:
                self._expire_first(stream, surplus, "surplus")

    def _expire_first(self, stream: str, most: int, cause: str) -> None:
        for share in self._db.rows(
            Share,
            f"SELECT {Share.columns('s')} FROM shares s JOIN policies p ON p.name = s.producer WHERE s.stream = ? "
            "AND s.state = 'ready' ORDER BY s.oldest - p.version, s.ord LIMIT ?",
            (stream, most),
        ):
            self._groups.expire(share, cause)


def _doomed(group: PlayingGroup, heads: Mapping[str, int], wanted: Sequence[PolicyRules]) -> bool:
    """Return whether every share of the group would be too old already."""
    return all(
        producer in group.versions and heads[producer] - group.versions[producer][0] > rules.staleness
        for rules in wanted
        for producer in rules.producers
    )


def as_ready(share: Share, head: int) -> Ready:
    return Ready(
        id=f"{share.grp}/{share.producer}",
        order=share.ord,
        oldest=share.oldest,
        staleness=max(0, head - share.oldest),
        tokens=share.tokens,
        spread=share.std,
        served=share.served,
        group=share.grp,
        producer=share.producer,
        head=head,
        samples=share.samples,
    )

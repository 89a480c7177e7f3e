"""Batches: shares leased to a trainer for one step, and committed with the version that the step made.

A batch is leased, renewed and committed by the attempt that holds it. A trainer holds one batch at a time: asking
under a new attempt gives the earlier one up. A batch is served whole, or grows in parts as shares become ready; it
is committed only when it is complete. Nothing older than the staleness bound is ever served. Shares that a replayer
serves again have their own bound, and stay trained.

The only writer of batches and members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.kept_episodes import marked
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.serving import ServedSample, batch_rows, of_ranks, served
from rillflow.dataflow.ledger.shares import Key, Shares
from rillflow.dataflow.ledger.steps import Steps
from rillflow.dataflow.ledger.streams import Ready, Streams
from rillflow.dataflow.ledger.tables import BatchRow, Share
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.errors import BadRequest, LeaseLost
from rillflow.types import Batch, CommitBatch, LeaseBatch, RenewBatch

_OLD = "no longer this trainer's: "
_HINT = "join again: the trainer goes on from its last checkpoint"
_MOST_RANKS = 4096
_BATCH = f"SELECT {BatchRow.columns()} FROM batches"


class Batches(Part):
    def __init__(
        self,
        base: Base,
        *,
        groups: Groups,
        shares: Shares,
        streams: Streams,
        lineage: Lineage,
        steps: Steps,
        hooks: Hooks,
    ) -> None:
        super().__init__(base)
        self._groups = groups
        self._shares = shares
        self._streams = streams
        self._lineage = lineage
        self._steps = steps
        self._hooks = hooks
        # The latest batch: its key, the parts of the ranks, and the tasks that may be kept.
        self._divided: tuple[tuple[str, int, int], list[list[ServedSample]], set[str]] | None = None

    def open(self) -> None:
        """Take back batches with shares that a stage, added to the recipe since, has not handled."""
        for batch, policy in self._db.all("SELECT id, policy FROM batches WHERE state = 'leased'"):
            if self._shares.unhandled(policy, batch):
                self.release(batch, "stages_changed")

    def grace(self) -> None:
        """A live lease has its full time again."""
        self._db.run("UPDATE batches SET deadline = ? WHERE state = 'leased'", (self._deadline(),))

    def _deadline(self) -> float:
        return self._clock.now() + self._rules.batch_lease

    # ------------------------------------------------------------ serving

    def serve(self, ask: LeaseBatch, *, may_grow: bool, last: bool) -> Batch | None:
        """Return the part of its batch that the asker does not have yet, or None if nothing is ready.

        A batch is opened, and grows, only while it `may_grow`; when nothing more can come, the `last` one of a run
        may be smaller.
        """
        if not 0 <= ask.rank < ask.ranks <= _MOST_RANKS or ask.have < 0 or ask.least < 0:
            raise BadRequest("rank, ranks, have or least is out of range", f"at most {_MOST_RANKS} ranks, from rank 0")
        row = self._held(ask)
        if row is None:
            self._check(ask)
            row = self._open(ask, last) if may_grow else None
        elif may_grow and not row.complete and ask.have >= row.members:
            row = self._grow(row, last)
        if row is None or (ask.have == row.members and not row.complete):
            return None
        if ask.have > row.members:
            raise BadRequest(f"batch {row.id} has {row.members} groups, not {ask.have}", "ask for what follows")
        return self._batch(row, ask)

    def _held(self, ask: LeaseBatch) -> BatchRow | None:
        """Return the batch that this attempt holds, with its lease renewed."""
        self._db.run(
            "UPDATE batches SET deadline = ? WHERE attempt = ? AND state = 'leased'", (self._deadline(), ask.attempt)
        )
        row = self._db.row(BatchRow, f"{_BATCH} WHERE attempt = ?", (ask.attempt,))
        if row is not None and row.state != "leased":
            raise LeaseLost(f"batch {row.id} is {_OLD}{row.state}", "ask under a new attempt id")
        if row is not None and row.policy != ask.policy:
            raise BadRequest(f"attempt {ask.attempt!r:.80} is of policy {row.policy}", "draw attempt ids at random")
        if row is None and ask.have:
            raise LeaseLost("there is no batch of this attempt", "ask under a new attempt id, having nothing")
        return row

    def _check(self, ask: LeaseBatch) -> None:
        head, window = self._lineage.head(ask.policy), self._rules.policies[ask.policy].window
        if ask.version != head:
            raise LeaseLost(f"the trainer stands at version {ask.version}, the ledger at {head}", _HINT)
        if not 1 <= ask.groups <= window:
            raise BadRequest(
                f"a batch of {ask.groups} groups can never be ready: at most {window} are admitted",
                "ask for trainer.batch_groups groups",
            )

    def _open(self, ask: LeaseBatch, last: bool) -> BatchRow | None:
        """Open a batch with the shares that can be served now; None when they are too few."""
        self.release_all("replaced", ask.policy)
        self._streams.refuse_stale(ask.policy, between_steps=True)
        ready = self._ready(ask.policy, ask.least)
        replayed = self._replayed(ask) if ready or not last else []
        take = _how_many(len(ready), ask.groups - len(replayed), ask.least, last)
        if take is None or (not replayed and take == 0):
            return None
        row = self._insert(ask, ask.version, ask.groups, ask.least)
        return self._add(row, replayed, self._pick(row, ready, take), last)

    def _insert(self, asker: LeaseBatch | CommitBatch, version: int, wanted: int, least: int) -> BatchRow:
        """Write a new batch without members."""
        batch = f"{self._rules.mark}b{self._db.counter('batches'):06d}"
        self._db.count("batches")
        self._db.run(
            "INSERT INTO batches (id, policy, attempt, incarnation, version, wanted, least, deadline, leased_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(batch, asker.policy, asker.attempt, asker.incarnation, version, wanted, least),
                *(self._deadline(), self._clock.now()),
            ),
        )
        return self._row(batch)

    def _grow(self, row: BatchRow, last: bool) -> BatchRow:
        """Add what is ready, as one part, when that is enough."""
        self._streams.refuse_stale(row.policy, between_steps=True)
        ready = self._ready(row.policy, row.least)
        take = _how_many(len(ready), row.wanted - row.members, row.least, last) or 0
        return self._add(row, [], self._pick(row, ready, take), last)

    def _ready(self, policy: str, least: int) -> list[Ready]:
        """On-policy, a batch is the first groups of the order, not the first to be ready."""
        return self._streams.ready(policy, in_order=least > 0 and self._rules.policies[policy].on_policy)

    def _pick(self, row: BatchRow, ready: list[Ready], take: int) -> list[Ready]:
        """Return the picked shares in the order of their admission."""
        if take == 0 or (row.least and self._rules.policies[row.policy].on_policy):
            return ready[:take]
        picked = set(self._hooks.pick(ready, take))
        return [share for share in ready if share.id in picked]

    def _replayed(self, ask: LeaseBatch) -> list[Ready]:
        """Return the trained shares that the replayer wants to serve again."""
        replayer = self._hooks.replayer
        if replayer is None:
            return []
        pool = {share.id: share for share in self._streams.pool(ask.policy, replayer.pool, replayer.staleness)}
        return [pool[name] for name in self._hooks.replay(list(pool.values()), ask.groups)]

    def _add(self, row: BatchRow, replayed: Sequence[Ready], fresh: Sequence[Ready], last: bool) -> BatchRow:
        self._divided = None
        members = [(share, 1) for share in replayed] + [(share, 0) for share in fresh]
        self._db.many(
            "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (row.id, row.members + n, share.group, share.producer, row.parts, share.head, again)
                for n, (share, again) in enumerate(members)
            ],
        )
        if fresh:
            self._shares.lease(row.policy, row.id, [(share.group, share.producer) for share in fresh])
        complete = last or row.members + len(members) == row.wanted
        self._db.run(
            "UPDATE batches SET members = members + ?, parts = parts + ?, samples = samples + ?, complete = ? "
            "WHERE id = ?",
            (len(members), bool(members), sum(share.samples for share, _ in members), complete, row.id),
        )
        return self._row(row.id)

    def _row(self, batch: str) -> BatchRow:
        row = self._db.row(BatchRow, f"{_BATCH} WHERE id = ?", (batch,))
        assert row is not None, batch
        return row

    def _batch(self, row: BatchRow, ask: LeaseBatch) -> Batch:
        stream = row.policy
        if ask.ranks > 1:
            of_rank, keep = self._of_rank(row, ask)
            rows = [found for found in of_rank if found.member >= ask.have]
        else:
            rows = batch_rows(self._db, row.id, stream, ask.have)
            keep = marked(rows, self._rules)
        own = {f"{found.grp}.{found.place}" for found in rows} if keep else set()
        return Batch(
            id=row.id,
            attempt=row.attempt,
            policy=stream,
            version=row.version,
            samples=served(self._db, rows, stream, self._rules),
            seconds=row.deadline - self._clock.now(),
            groups=row.members,
            complete=bool(row.complete),
            keep=sorted(keep & own),
        )

    def _of_rank(self, row: BatchRow, ask: LeaseBatch) -> tuple[list[ServedSample], set[str]]:
        """A rank's part. All ranks ask one after the other: the batch is read and divided once for all of them."""
        key = (row.id, row.members, ask.ranks)
        if self._divided is None or self._divided[0] != key:
            rows = batch_rows(self._db, row.id, row.policy, 0)
            self._divided = key, of_ranks(rows, ask.ranks), marked(rows, self._rules)
        return self._divided[1][ask.rank], self._divided[2]

    def renew(self, ask: RenewBatch) -> bool:
        """Renew the lease of the batch; return whether this attempt holds it."""
        return bool(
            self._db.run(
                "UPDATE batches SET deadline = ? WHERE id = ? AND attempt = ? AND state = 'leased'",
                (self._deadline(), ask.batch, ask.attempt),
            )
        )

    # ------------------------------------------------------------ committing

    def commit(self, news: CommitBatch) -> bool:
        """Shares trained and version moved, together; False when this very commit was taken before."""
        row = self._committable(news)
        if row is None:
            return False
        parent = self._lineage.head(news.policy)
        self._lineage.move(news.policy, news.version, news.restorable)
        if news.version > parent + 1:  # the numbers between were published by a trainer that died before its commit
            self._groups.rerun_dead(news.policy, parent, news.version - 1)
        self._db.run(
            "UPDATE batches SET state = 'committed', produced = ?, ended_at = ? WHERE id = ?",
            (news.version, self._clock.now(), row.id),
        )
        self._groups.close(*self._shares.train(news.policy, row.id, news.version))
        self._steps.write(news, row.id, parent)
        replayer = self._hooks.replayer
        self._shares.let_go_of_trained(news.policy, news.restorable, replayer.pool if replayer else 0)
        return True

    def _named(self, news: CommitBatch) -> BatchRow | None:
        """Return the batch that is to be committed. One of several ledgers that gave nothing to the step has an empty
        one, so that every step is in every ledger."""
        if news.batch or self._rules.ledgers == 1:
            return self._db.row(BatchRow, f"{_BATCH} WHERE id = ?", (news.batch,))
        row = self._db.row(BatchRow, f"{_BATCH} WHERE attempt = ?", (news.attempt,))
        if row is None:
            row = self._insert(news, self._lineage.head(news.policy), 0, 0)
            return self._add(row, [], [], last=True)
        if row.members:
            raise BadRequest(f"batch {row.id} of this attempt has groups", "name the batch that was leased")
        return row

    def _committable(self, news: CommitBatch) -> BatchRow | None:
        row = self._named(news)
        if row is None or row.attempt != news.attempt or row.policy != news.policy:
            raise LeaseLost(f"there is no batch {news.batch!r:.80} of this attempt", _HINT)
        if row.state == "committed" and row.produced == news.version:
            return None
        if row.state != "leased" or row.incarnation != news.incarnation:
            raise LeaseLost(f"batch {row.id} is {_OLD}{row.state}", _HINT)
        if not row.complete:
            raise BadRequest(f"batch {row.id} has {row.members} of {row.wanted} groups", "ask on until it is complete")
        if not (math.isfinite(news.step_seconds) and math.isfinite(news.wait_seconds)):
            raise BadRequest("step_seconds and wait_seconds must be numbers", "check the trainer's clock")
        return row

    # ------------------------------------------------------------ giving back

    @property
    def any_leased(self) -> bool:
        """True while a trainer holds a batch."""
        return bool(self._db.value("SELECT 1 FROM batches WHERE state = 'leased' LIMIT 1"))

    def release_all(self, why: str, policy: str | None = None) -> None:
        """Give up every leased batch, of one policy or of all; its fresh shares are ready again."""
        for batch, of in self._db.all("SELECT id, policy FROM batches WHERE state = 'leased'"):
            if policy in (None, of):
                self.release(batch, why)

    def release_incomplete(self, why: str) -> None:
        """Give up the leased batches that lack groups. The others have all that their commit needs."""
        for batch in self._db.column("SELECT id FROM batches WHERE state = 'leased' AND complete = 0"):
            self.release(batch, why)

    def expire(self) -> None:
        query = "SELECT id FROM batches WHERE state = 'leased' AND deadline < ?"
        for batch in self._db.column(query, (self._clock.now(),)):
            self.release(batch, "lease_expired")

    def release(self, batch: str, why: str) -> None:
        """Give the batch up, if it is leased; its trainer learns of it when it calls next."""
        if not self._db.run(
            "UPDATE batches SET state = 'released', ended_at = ? WHERE id = ? AND state = 'leased'",
            (self._clock.now(), batch),
        ):
            return
        self._db.count(f"released.{why}")
        for share in self._fresh(batch):
            self._shares.back(share)

    def release_replaying(self, key: Key, why: str) -> None:
        """Give up the leased batch of the stream that serves this trained share again, if one does."""
        batch = self._db.value(
            "SELECT b.id FROM batches b JOIN members m ON m.batch = b.id WHERE b.policy = ? AND b.state = 'leased' "
            "AND m.grp = ? AND m.producer = ? AND m.replayed = 1",
            (key[2], key[0], key[1]),
        )
        if batch is not None:
            self.release(batch, why)

    def _fresh(self, batch: str) -> list[Share]:
        return self._db.rows(
            Share,
            f"SELECT {Share.columns('s')} FROM members m JOIN batches b ON b.id = m.batch JOIN shares s "
            "ON s.grp = m.grp AND s.producer = m.producer AND s.stream = b.policy WHERE m.batch = ? AND m.replayed = 0 "
            "ORDER BY m.n",
            (batch,),
        )

    def roll_back(self, policy: str, checkpoint: int) -> int:
        """Un-end the shares that were trained into versions after `checkpoint`; returns how many."""
        batches = self._db.column(
            "SELECT id FROM batches WHERE state = 'committed' AND policy = ? AND produced > ? ORDER BY produced",
            (policy, checkpoint),
        )
        shares: list[Share] = []
        for batch in batches:
            self._shares.untrain(policy, batch)
            self._db.run("UPDATE batches SET state = 'rolled_back' WHERE id = ?", (batch,))
            shares += self._fresh(batch)
        for share in shares:
            self._shares.back(share)
        for share in shares:
            self._serve_again(share)
        if shares:
            self._db.count("rolled_back", len(shares))
        return len(shares)

    def _serve_again(self, share: Share) -> None:
        """Serve a share again that was trained; where its rows are gone, its tasks are played again instead."""
        if self._groups.row(share.grp).state == "playing":
            return  # played again for another share's sake
        if share.held and not share.damaged:
            self._groups.close(share.grp)
        elif self._shares.untouched(share.grp):
            self._groups.rerun(share.grp, self._shares.gone(share.grp), "payload_gone")
        else:
            now = self._shares.find(share.key)
            assert now is not None, share.key
            self._groups.expire(now, "payload_gone")


def _how_many(ready: int, missing: int, least: int, last: bool) -> int | None:
    """How many of the ready shares are added now; None when a batch served whole must wait."""
    if ready >= missing:
        return missing
    if last:
        return ready
    if least == 0:
        return None
    return ready if ready >= least else 0

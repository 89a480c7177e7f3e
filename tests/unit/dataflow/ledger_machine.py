"""A ledger, nodes, storage units, trainers and a stage that come, go, come late and come back.

The machine keeps the acknowledged facts in plain sets, and compares after every step. `rollout_machine` has the rules
of nodes and units.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from rollout_machine import NODES, REPLAY_BOUND, WHO, RolloutMachine

from dataflow_world import RULES
from ledger_moves import check_moves
from rillflow.dataflow.audit import examine
from rillflow.errors import LeaseLost
from rillflow.types import Batch, BatchSample

__all__ = ["NODES", "WHO", "LedgerMachine"]

_AGAIN = ("rolled_back", "stale", "damaged", "unit_gone", "payload_gone")


class LedgerMachine(RolloutMachine):
    # ------------------------------------------------------------ trainers

    def live(self, name: str) -> set[int]:
        return {0, *(version for version, _ in self.lines[name])}

    def trained(self, name: str) -> set[tuple[str, str]]:
        return {share for _, shares in self.lines[name] for share in shares}

    def look(self, name: str, samples: list[BatchSample]) -> None:
        """Served samples were sent before, are within the bound, of live versions, and not trained yet."""
        bound = self.world.rules.policies[name].staleness
        heads = self.world.ledger.heads
        for entry in samples:
            assert (entry.policy, heads[entry.policy] - entry.staleness) == self.tokens[entry.id]
            assert 0 <= entry.staleness <= (REPLAY_BOUND if entry.replayed else bound)
            assert self.tokens[entry.id][1] in self.live(entry.policy)
            assert ((entry.group, entry.policy) in self.trained(name)) == entry.replayed
        assert len({entry.id for entry in samples}) == len(samples)

    @rule(who=WHO)
    def serve(self, who: int) -> None:
        """A whole batch, under a new attempt."""
        name = self.name(who)
        batch = self.world.ask(policy=name).batch
        if self.world.ledger.phase != "training":
            assert batch is None, "a run that has reached its target leases no batch"
            return  # what the trainer holds may still be committed
        self.streams.pop(name, None)
        self.batches.pop(name, None)
        if batch is not None:
            assert batch.complete
            assert batch.version == self.world.ledger.lineage.head(name)
            self.look(name, batch.samples)
            self.batches[name] = batch

    @rule(who=WHO, least=st.integers(1, 2))
    def stream(self, who: int, least: int) -> None:
        """The next part of a batch; the first under a new attempt."""
        name = self.name(who)
        if name not in self.streams:
            self.world.attempts += 1
            self.batches.pop(name, None)
        attempt, have, before = self.streams.get(name, (f"s{self.world.attempts}", 0, []))
        try:
            batch = self.world.ask(attempt, policy=name, have=have, least=least).batch
        except LeaseLost:
            del self.streams[name]
            return
        if batch is None:
            return
        assert batch.groups > have or batch.complete
        self.look(name, batch.samples)
        samples = before + batch.samples
        whole = self.world.ask(attempt, policy=name, least=least).batch
        assert whole is not None
        assert whole.samples == samples
        self.streams[name] = (attempt, batch.groups, samples)
        if batch.complete:
            del self.streams[name]
            self.batches[name] = msgspec.structs.replace(whole, samples=samples)

    @precondition(lambda self: self.batches)
    @rule(who=WHO, skip=st.integers(0, 2), keep=st.integers(1, 3))
    def commit(self, who: int, skip: int, keep: int) -> None:
        """`skip` numbers were published by trainers that died before their commit; `keep` checkpoints are left."""
        batch = self.batches.pop(self.name(who), None)
        if batch is None:
            return
        name = batch.policy
        version = self.world.ledger.lineage.highest(name) + 1 + skip
        restorable = sorted(self.live(name))[-keep:][0]
        try:
            self.world.commit(batch, version, restorable)
        except LeaseLost:
            return
        fresh = frozenset((entry.group, entry.policy) for entry in batch.samples if not entry.replayed)
        self.lines[name].append((version, fresh))
        self.committed.append((batch, version))

    @rule(who=WHO, steps=st.integers(1, 3), parts=st.booleans(), skip=st.integers(0, 1), keep=st.integers(1, 3))
    def train(self, who: int, steps: int, parts: bool, skip: int, keep: int) -> None:
        """A good stretch: some steps, as far as there is anything to train on."""
        name = self.name(who)
        for _ in range(steps):
            if parts:
                for _ in range(6):
                    self.play_some(self.world.rules.group_size)
                    self.run_stage()
                    if name not in self.batches or name in self.streams:
                        self.stream(who, 1)
            else:
                self.play()
                self.run_stage()
                self.serve(who)
            self.commit(who, skip, keep)

    def run_stage(self) -> None:
        if self.world.rules.policies["main"].stages:
            self.lease_stage(9)
            if self.stage is not None:
                self.commit_stage(False)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        batch, version = data.draw(st.sampled_from(self.committed[-3:]))
        heads = self.world.ledger.heads
        try:
            self.world.commit(batch, version)
        except LeaseLost:
            assert version not in self.live(batch.policy) or self.joined_since(batch)
        assert self.world.ledger.heads == heads

    def joined_since(self, batch: Batch) -> bool:
        held_by = self.world.ledger.db.value("SELECT incarnation FROM batches WHERE id = ?", (batch.id,))
        return bool(held_by != self.world.lives[batch.policy])

    @rule(who=WHO, back=st.integers(0, 3), published=st.integers(0, 1))
    def rejoin(self, who: int, back: int, published: int) -> None:
        name = self.name(who)
        line = self.lines[name]
        versions = [0, *(version for version, _ in line)]
        checkpoint = versions[max(0, len(versions) - 1 - back)]
        highest = self.world.ledger.lineage.highest(name)
        joined = self.world.join(checkpoint, highest + published, name)
        assert joined.orphaned == [version for version in versions if version > checkpoint]
        assert joined.rolled_back == sum(len(shares) for version, shares in line if version > checkpoint)
        assert joined.highest == highest + published
        self.lines[name] = [(version, shares) for version, shares in line if version <= checkpoint]
        assert joined.steps == len(self.lines[name])
        self.batches.pop(name, None)
        self.streams.pop(name, None)

    # ------------------------------------------------------------ a stage

    @precondition(lambda self: self.world.rules.policies["main"].stages)
    @rule(groups=st.integers(1, 3))
    def lease_stage(self, groups: int) -> None:
        self.world.attempts += 1
        self.stage = self.world.ask_stage("score", f"w{self.world.attempts}", groups)

    @precondition(lambda self: self.stage is not None)
    @rule(old=st.booleans())
    def commit_stage(self, old: bool) -> None:
        batch, self.stage = self.stage, None
        assert batch is not None
        try:
            ack = self.world.commit_stage(batch, "score", self.row(old))
        except LeaseLost:
            return
        if ack.accepted:
            assert self.world.commit_stage(batch, "score").accepted  # the same attempt again

    # ------------------------------------------------------------ what always holds

    @invariant()
    def holds(self) -> None:
        """Look after every step that has changed the ledger."""
        if not hasattr(self, "world"):
            return
        db = self.world.ledger.db
        if self.looked_at != (db, db.changes):
            self.look_at_all()
            self.looked_at = (db, db.changes)

    def look_at_all(self) -> None:
        self.the_audit_balances()
        self.a_run_that_has_ended_has_nothing_outstanding()
        self.trained_once_on_the_live_lines()
        self.nothing_accepted_is_lost()
        self.what_waits_is_bounded()

    def the_audit_balances(self) -> None:
        check_moves(self.world.ledger)
        report = examine(self.world.ledger.db._connection)
        assert report.balanced, [identity for identity in report.identities if not identity.ok]

    def a_run_that_has_ended_has_nothing_outstanding(self) -> None:
        if self.world.ledger.phase == "ended":
            assert self.world.ledger.groups.outstanding == 0
            assert not self.world.ledger.evaluations.running

    def trained_once_on_the_live_lines(self) -> None:
        for name, line in self.lines.items():
            assert all(first < second for (first, _), (second, _) in pairwise(line))
            assert sum(len(shares) for _, shares in line) == len(self.trained(name))
            rows = self.world.ledger.db.all(
                "SELECT grp, producer FROM shares WHERE stream = ? AND state = 'trained'", (name,)
            )
            assert {(row["grp"], row["producer"]) for row in rows} == self.trained(name)

    def nothing_accepted_is_lost(self) -> None:
        rows = self.world.ledger.db.all("SELECT id, state, cause FROM attempts")
        states = {row["id"]: (row["state"], row["cause"]) for row in rows}
        for attempt in self.sent:
            state, cause = states[attempt]
            assert (state, cause) == ("done", "") or (state == "returned" and cause in _AGAIN)

    def what_waits_is_bounded(self) -> None:
        ledger = self.world.ledger
        counts = ledger.steps.counters()
        again = sum(number for name, number in counts.items() if name.startswith(("rerun.", "rolled_back")))
        rules = self.world.rules.policies
        assert ledger.groups.count("train", "playing") <= max(found.window for found in rules.values()) + again
        for name, found in rules.items():
            assert ledger.shares.count(name, "ready") <= 3 * found.window + again
            assert ledger.streams.outstanding(name) >= 0


assert RULES.policy == "main"

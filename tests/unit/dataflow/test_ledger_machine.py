"""Whatever happens in whatever order: the audit balances, nothing acknowledged is lost, nothing is trained twice."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dataflow_world import World, prompts, sample
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rillflow.errors import LeaseLost
from rillflow.types import Batch, TaskLease

NODES = st.sampled_from(["n0", "n1"])
_SHM = Path("/dev/shm")


class LedgerMachine(RuleBasedStateMachine):
    """A ledger, two nodes and a trainer that come, go, come late and come back; the model is kept in plain sets."""

    @initialize(bound=st.integers(0, 2), heldout=st.booleans(), size=st.integers(1, 2))
    def start(self, bound: int, heldout: bool, size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=_SHM if _SHM.is_dir() else None))
        self.bound = bound
        self.world = World(
            self.folder,
            heldout=prompts(1, "h") if heldout else None,
            staleness=bound,
            group_size=size,
            attempts=2,
            evaluate_every=2,
        )
        self.lives = {"n0": 0, "n1": 0}
        self.leases: list[tuple[str, TaskLease, int]] = []
        self.batch: Batch | None = None
        self.batches: list[tuple[Batch, int]] = []
        self.line: list[tuple[int, frozenset[str]]] = []  # the live line: version and the groups trained into it
        self.tokens: dict[str, int] = {}  # the version of every sample's tokens
        self.accepted: set[str] = set()
        self.ack()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.ack()
            self.world.close()
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------ what is acknowledged

    @rule()
    def ack(self) -> None:
        """The service has committed: from now on a crash loses none of it."""
        self.world.ledger.commit()
        self.kept = (
            list(self.line),
            set(self.accepted),
            dict(self.tokens),
            dict(self.lives),
            list(self.batches),
            self.batch,
            self.world.incarnation,
        )
        self.world.check()

    @rule()
    def crash(self) -> None:
        self.world.crash()
        line, accepted, tokens, lives, batches, self.batch, self.world.incarnation = self.kept
        self.line, self.accepted, self.tokens = list(line), set(accepted), dict(tokens)
        self.lives, self.batches = dict(lives), list(batches)
        self.world.check()
        self.ack()

    # ------------------------------------------------------------ nodes

    @rule(node=NODES, want=st.integers(1, 6), behind=st.integers(0, 3))
    def lease(self, node: str, want: int, behind: int) -> None:
        version = max(0, self.world.ledger.lineage.head - behind)
        for lease in self.world.lease(want, version, node, f"{node}{self.lives[node]}"):
            assert not self.world.ledger.lineage.died(version, version)
            if lease.task.lane == "train":
                assert self.world.ledger.lineage.head - version <= self.bound
            self.leases.append((node, lease, version))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), refreshed=st.booleans())
    def complete(self, data: st.DataObject, reward: float, refreshed: bool) -> None:
        """Any lease that was ever given: held, lost, expired, or completed before."""
        node, lease, version = data.draw(st.sampled_from(self.leases[-12:]))
        head = self.world.ledger.lineage.head
        if refreshed and head >= version:
            version = head
        before = lease.attempt in self.accepted
        ack = self.world.done(lease, reward, samples=[sample(version)], node=node)
        if ack.accepted and not before:
            self.accepted.add(lease.attempt)
            self.tokens[f"{lease.task.id}.0"] = version

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        node, lease, _ = data.draw(st.sampled_from(self.leases[-12:]))
        self.world.fail(lease, node=node)

    @rule(seconds=st.sampled_from([3.0, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.time += seconds
        self.world.ledger.expire()

    @rule(node=NODES)
    def beat(self, node: str) -> None:
        mine = [lease.attempt for name, lease, _ in self.leases[-12:] if name == node]
        self.world.beat(mine, node, f"{node}{self.lives[node]}")

    @rule(node=NODES)
    def restart_node(self, node: str) -> None:
        self.lives[node] += 1
        self.world.beat((), node, f"{node}{self.lives[node]}")

    @rule()
    def play(self) -> None:
        """A good stretch: everything that can be played is, in the order of leasing."""
        while leases := self.world.lease(8, node="good"):
            for lease in leases:
                version = self.world.ledger.lineage.head
                if self.world.done(lease, samples=[sample(version)]).accepted:
                    self.accepted.add(lease.attempt)
                    self.tokens[f"{lease.task.id}.0"] = version

    # ------------------------------------------------------------ the trainer

    @rule()
    def serve(self) -> None:
        batch = self.world.ask().batch
        self.batch = batch
        if batch is None:
            return
        live = {0, *(version for version, _ in self.line)}
        assert batch.version == self.world.ledger.lineage.head
        for entry in batch.samples:
            assert 0 <= batch.version - self.tokens[entry.id] <= self.bound
            assert self.tokens[entry.id] in live
        assert not {entry.group for entry in batch.samples} & self.trained

    @precondition(lambda self: self.batch is not None)
    @rule(skip=st.integers(0, 2))
    def commit(self, skip: int) -> None:
        """`skip` numbers were published by trainers that died before their commit."""
        batch, self.batch = self.batch, None
        assert batch is not None
        version = self.world.ledger.lineage.highest + 1 + skip
        try:
            self.world.commit(batch, version)
        except LeaseLost:
            return
        self.line.append((version, frozenset(entry.group for entry in batch.samples)))
        self.batches.append((batch, version))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        batch, version = data.draw(st.sampled_from(self.batches[-3:]))
        head = self.world.ledger.lineage.head
        try:
            self.world.commit(batch, version)
        except LeaseLost:
            assert version not in {live for live, _ in self.line} or self.joined_since(batch)
        assert self.world.ledger.lineage.head == head

    def joined_since(self, batch: Batch) -> bool:
        held_by = self.world.ledger.db.value("SELECT incarnation FROM batches WHERE id = ?", (batch.id,))
        return bool(held_by != self.world.incarnation)

    @rule(back=st.integers(0, 3), published=st.integers(0, 1))
    def rejoin(self, back: int, published: int) -> None:
        versions = [0, *(version for version, _ in self.line)]
        checkpoint = versions[max(0, len(versions) - 1 - back)]
        highest = self.world.ledger.lineage.highest
        joined = self.world.join(checkpoint, highest + published)
        assert joined.orphaned == [version for version in versions if version > checkpoint]
        assert joined.rolled_back == sum(len(groups) for version, groups in self.line if version > checkpoint)
        assert joined.highest == highest + published
        self.line = [(version, groups) for version, groups in self.line if version <= checkpoint]
        assert joined.steps == len(self.line)
        self.batch = None

    # ------------------------------------------------------------ what always holds

    @property
    def trained(self) -> set[str]:
        return {group for _, groups in self.line for group in groups}

    @invariant()
    def trained_once_on_the_live_line(self) -> None:
        if hasattr(self, "world"):
            assert sum(len(groups) for _, groups in self.line) == len(self.trained)
            rows = self.world.ledger.db.all("SELECT id FROM groups WHERE state = 'trained'")
            assert {row["id"] for row in rows} == self.trained

    @invariant()
    def nothing_accepted_is_lost(self) -> None:
        if hasattr(self, "world"):
            rows = self.world.ledger.db.all("SELECT id, state, cause FROM attempts")
            states = {row["id"]: (row["state"], row["cause"]) for row in rows}
            for attempt in self.accepted:
                assert states[attempt] in (("done", ""), ("returned", "rolled_back"), ("returned", "stale"))

    @invariant()
    def admission_is_capped(self) -> None:
        if hasattr(self, "world"):
            groups = self.world.ledger.groups
            rolled_back = self.world.ledger.db.counter("rolled_back")
            assert groups.outstanding <= self.world.rules.window + rolled_back


LedgerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLedgerMachine = LedgerMachine.TestCase

"""A ledger, nodes and storage units that come, go, come late and come back: the half of `ledger_machine` that plays."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dataflow_world import World, policies, prompts, sample
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import Replay
from rillflow.dataflow.ledger.database import Database
from rillflow.errors import LeaseLost
from rillflow.types import Ack, Batch, BatchSample, Row, SampleMeta, TaskLease

NODES = st.sampled_from(["n0", "n1"])
WHO = st.integers(0, 1)  # a policy, by its number
REPLAY_BOUND = 6
_SHM = Path("/dev/shm")
KINDS = {
    "one": {"main": {}},
    "two": {"main": {}, "other": {"staleness": 1, "batch_groups": 1}},
    "mixed": {"main": {"trains_on": ("main", "other")}, "other": {"staleness": 2}},
    "shared": {"main": {}, "other": {"trains_on": ("main",), "batch_groups": 1}},
    "staged": {"main": {"stages": ("score",)}, "other": {"staleness": 1}},
    "early": {"main": {"trains_on": ("main", "other")}, "other": {"staleness": 2, "total_steps": 1}},
    "strict": {"main": {"staleness": 2, "trains_on": ("other", "main")}, "other": {"staleness": 0}},
    "all": {"main": {"stages": ("score",), "trains_on": ("main", "other")}, "other": {"trains_on": ("main",)}},
}


class RolloutMachine(RuleBasedStateMachine):
    @initialize(
        bound=st.integers(0, 2),
        kind=st.sampled_from(sorted(KINDS)),
        heldout=st.booleans(),
        size=st.integers(1, 2),
        replay=st.booleans(),
        goal=st.sampled_from([None, 1.0]),
    )
    def start(self, *, bound: int, kind: str, heldout: bool, size: int, replay: bool, goal: float | None) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=_SHM if _SHM.is_dir() else None))
        found = {name: {"staleness": bound} | rules for name, rules in KINDS[kind].items()}
        filters = [("zero_variance", ZeroVariance())]
        sampler = {"sampler": Replay(ratio=0.5, pool=3, staleness=REPLAY_BOUND)} if replay else {}
        self.world = self.new_world(
            Hooks(filters=filters, **sampler),
            heldout=prompts(1, "h") if heldout else None,
            policies=policies(**found),
            group_size=size,
            attempts=2,
            evaluate_every=2,
            target=goal,
            unit_timeout=60.0,
            drop_after=20.0,
            group_deadline=100.0,
        )
        self.names = list(found)
        self.lives = {"n0": 0, "n1": 0}
        self.leases: list[tuple[str, TaskLease, dict[str, int]]] = []
        self.sent: dict[str, tuple[float, list[SampleMeta]]] = {}  # the accepted completion of an attempt
        self.spoiled: set[str] = set()  # attempts that were completed with a reward which is not finite
        self.batches: dict[str, Batch] = {}  # complete, in a trainer's hands
        self.streams: dict[str, tuple[str, int, list[BatchSample]]] = {}  # incomplete: attempt, groups, samples
        self.committed: list[tuple[Batch, int]] = []
        # The live lines: versions, and the fresh shares trained into them.
        self.lines: dict[str, list[tuple[int, frozenset[tuple[str, str]]]]] = {name: [] for name in self.names}
        self.tokens: dict[str, tuple[str, int]] = {}  # the policy and version of every sample
        self.stage: Batch | None = None
        self.told: list[int] = []
        self.segments = 0
        self.unit_v = False
        self.looked_at: tuple[Database, int] | None = None
        self.ack()

    def new_world(self, hooks: Hooks, **rules: Any) -> World:
        return World(self.folder, hooks=hooks, **rules)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.ack()
            self.world.close()
            shutil.rmtree(self.folder)

    def life(self, node: str) -> str:
        """The incarnation that the node of this name is in."""
        return f"{node}{self.lives[node]}"

    def name(self, who: int) -> str:
        return self.names[who % len(self.names)]

    # ------------------------------------------------------------ what is acknowledged

    @rule()
    def ack(self) -> None:
        """The service has committed: from now on a crash loses none of it."""
        self.world.ledger.commit()
        self.kept: dict[str, Any] = {
            "lines": {name: list(line) for name, line in self.lines.items()},
            "sent": dict(self.sent),
            "spoiled": set(self.spoiled),
            "tokens": dict(self.tokens),
            "lives": dict(self.lives),
            "leases": list(self.leases),  # an attempt whose answer was lost may be given to another node
            "committed": list(self.committed),
            "batches": dict(self.batches),
            "streams": dict(self.streams),
            "stage": self.stage,
            "told": list(self.told),
            "unit_v": self.unit_v,
        }
        self.kept_world = (self.world.incarnation, dict(self.world.lives))

    @rule()
    def crash(self) -> None:
        """Killed: uncommitted changes are gone."""
        self.world.crash()
        for name, value in self.kept.items():
            setattr(self, name, value)
        self.world.incarnation, self.world.lives = self.kept_world[0], dict(self.kept_world[1])
        self.ack()

    @rule()
    def restart(self) -> None:
        """Ended in peace, and started again."""
        self.world.ledger.close()
        self.world.ledger = self.world.open()
        self.ack()

    @rule()
    def submit(self) -> None:
        self.world.ledger.advance()

    # ------------------------------------------------------------ nodes

    @rule(node=NODES, want=st.integers(1, 6), behind=st.integers(0, 3), who=WHO)
    def lease(self, node: str, want: int, behind: int, who: int) -> None:
        heads, policy = self.world.ledger.heads, self.name(who)
        versions = heads | {policy: max(0, heads[policy] - behind)}
        life, ask = self.life(node), f"asked{self.world.asks}"
        leases = self.world.lease(want, node=node, life=life, versions=versions, ask=ask)
        again = self.world.lease(want, node=node, life=life, versions=versions, ask=ask)
        assert {lease.attempt for lease in again} == {lease.attempt for lease in leases}
        for lease in leases:
            for name, version in versions.items():
                assert version in self.live(name)
                unfinished = set(self.world.ledger.lineage.unfinished())
                takers = [
                    self.world.rules.policies[stream]
                    for stream in self.world.rules.streams_of(name)
                    if stream in unfinished
                ]
                if lease.task.lane == "train":
                    assert all(heads[name] - version <= rules.staleness for rules in takers)
            self.leases.append((node, lease, versions))

    def row(self, old: bool) -> Row:
        """In a segment of its own, or in one that may be gone, of a unit that may be."""
        if not old:
            self.segments += 1
        return self.world.row("v" if self.unit_v and not old else "u", 0 if old else self.segments)

    def send(self, node: str, lease: TaskLease, reward: float, samples: list[SampleMeta]) -> Ack:
        """Complete an attempt; an earlier completion of it stands."""
        try:
            ack = self.world.done(lease, reward, samples=samples, node=node)
        except LeaseLost:
            assert lease.attempt in self.sent or lease.attempt in self.spoiled
            assert self.sent.get(lease.attempt) != (reward, samples)
            raise
        self.note(lease, ack, reward, samples)
        return ack

    def note(self, lease: TaskLease, ack: Ack, reward: float, samples: list[SampleMeta]) -> None:
        """Note what was accepted of an attempt."""
        if ack.accepted and lease.attempt not in self.sent:
            self.sent[lease.attempt] = (reward, samples)
            for number, found in enumerate(samples):
                self.tokens[f"{lease.task.id}.{number}"] = (found.policy, found.oldest)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), refreshed=st.booleans(), old=st.booleans(), who=WHO)
    def complete(self, data: st.DataObject, reward: float, refreshed: bool, old: bool, who: int) -> None:
        """Any lease that was ever given: held, lost, expired, or completed before, then with another payload."""
        node, lease, versions = data.draw(st.sampled_from(self.leases[-12:]))
        heads = self.world.ledger.heads
        played = self.names if data.draw(st.booleans()) else [self.name(who)]
        samples = [
            sample(max(heads[name], versions[name]) if refreshed else versions[name], policy=name, row=self.row(old))
            for name in played
        ]
        with suppress(LeaseLost):
            self.send(node, lease, reward, samples)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def complete_again(self, data: st.DataObject) -> None:
        """The same news: taken once, acknowledged as long as it counts."""
        node, lease, _ = data.draw(st.sampled_from(self.leases[-12:] or [None])) or (None, None, None)
        if lease is not None and lease.attempt in self.sent:
            before = self.world.ledger.db.value("SELECT count(*) FROM samples")
            reward, samples = self.sent[lease.attempt]
            self.world.done(lease, reward, samples=samples, node=node)
            assert self.world.ledger.db.value("SELECT count(*) FROM samples") == before

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        node, lease, _ = data.draw(st.sampled_from(self.leases[-12:]))
        self.world.fail(lease, node=node)

    @rule(seconds=st.sampled_from([3.0, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.time += seconds
        self.world.unit("u")
        self.world.ledger.expire()
        units = {info.unit for info in self.world.ledger.units().units}
        self.unit_v = self.unit_v and "v" in units

    @rule(node=NODES)
    def beat(self, node: str) -> None:
        mine = [lease.attempt for name, lease, _ in self.leases[-12:] if name == node]
        self.world.beat(mine, node, self.life(node))

    @rule(node=NODES)
    def restart_node(self, node: str) -> None:
        self.lives[node] += 1
        self.world.beat((), node, self.life(node))

    @rule()
    def play(self) -> None:
        """A good stretch: everything that can be played is, in the order of leasing."""
        self.all_is_well()
        rounds = 0
        while self.play_some(8):
            rounds += 1
            assert rounds < 100, "the same tasks are leased for ever"

    def all_is_well(self) -> None:
        """End what would keep a good stretch from coming to its end."""

    def play_some(self, want: int) -> int:
        leases = self.world.lease(want, node="good")
        for lease in leases:
            heads = self.world.ledger.heads
            samples = [sample(heads[name], policy=name, row=self.row(False)) for name in self.names]
            self.leases.append(("good", lease, heads))
            self.send("good", lease, float(lease.task.place), samples)
        return len(leases)

    # ------------------------------------------------------------ storage units

    @rule()
    def hear_of_the_other_unit(self) -> None:
        self.world.unit("v")
        self.unit_v = True

    @rule()
    def drop(self) -> None:
        self.told = self.world.unit("u", dropped=self.told)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def lose_rows(self, data: st.DataObject) -> None:
        _, samples = self.sent[data.draw(st.sampled_from(sorted(self.sent)[-8:]))]
        self.world.lose(*(found.row for found in samples))

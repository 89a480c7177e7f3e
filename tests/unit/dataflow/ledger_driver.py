"""Draws calls of all kinds to a ledger from a seed, and records them as traces.

`python tests/unit/dataflow/ledger_driver.py` records them again, with the ledger as it is now. Do so only when a change
of behaviour is wanted, and say which in the commit.
"""

from __future__ import annotations

import lzma
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from ledger_trace import CALLS, CHECKPOINT, FILE, OTHERS, TRACES, Call, make, open_world, view

from dataflow_world import World, sample
from rillflow.errors import RillflowError
from rillflow.types import (
    Batch,
    CommitBatch,
    CommitStage,
    CompleteTask,
    FailTask,
    Heartbeat,
    JoinTrainer,
    LeaseBatch,
    LeaseStage,
    LeaseTasks,
    LeaveRun,
    LoseRows,
    RenewBatch,
    RetireNode,
    Row,
    SampleColumns,
    SampleMeta,
    TaskLease,
    UnitBeat,
    UnitInfo,
    UserError,
)


class Driver:
    """Draws calls as nodes, units, trainers and stages would make them, and some that they should not make."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)
        self.calls: list[tuple[Call, Any]] = []
        self.lives = {"n0": 0, "n1": 0, "n2": 0}
        self.leases: list[tuple[str, TaskLease, dict[str, int]]] = []
        self.sent: dict[str, CompleteTask] = {}
        self.batches: dict[str, Batch] = {}
        self.parts: dict[str, tuple[str, int]] = {}
        self.commits: list[CommitBatch] = []
        self.stage: Batch | None = None
        self.numbers = iter(range(1 << 30))
        self.drop: list[int] = []
        self.joined: dict[str, str] = {}
        self.lines: dict[str, list[int]] = {name: [0] for name in world.rules.policies}

    def call(self, name: str, *given: Any) -> Any:
        kept = tuple(given) if name in OTHERS else msgspec.to_builtins(given[0])
        answer, told = make(self.world, (name, kept))
        self.calls.append(((name, kept), told))
        return answer

    @property
    def policies(self) -> list[str]:
        return list(self.world.rules.policies)

    def begin(self) -> None:
        self.call("unit_beat", UnitBeat(info=UnitInfo(unit="u", path="/u")))
        for policy in self.policies:
            self.join(policy, 0)
        self.call("look")

    def run(self, calls: int) -> None:
        """Make calls until `calls` has `count` entries."""
        weights = {
            self.lease: 5,
            self.play: 10,
            self.complete: 6,
            self.complete_oddly: 3,
            self.fail: 2,
            self.wait: 3,
            self.beat: 4,
            self.node_changes: 2,
            self.unit: 3,
            self.lose: 1,
            self.serve: 5,
            self.serve_parts: 4,
            self.commit: 7,
            self.commit_again: 1,
            self.rejoin: 1,
            self.run_stage: 4,
            self.service: 3,
        }
        while len(self.calls) < calls:
            self.draw.choices(list(weights), list(weights.values()))[0]()

    # ------------------------------------------------------------ nodes

    def node(self) -> tuple[str, str]:
        node = self.draw.choice(sorted(self.lives))
        return node, f"{node}{self.lives[node]}"

    def lease(self, want: int | None = None) -> list[tuple[str, TaskLease, dict[str, int]]]:
        node, life = self.node()
        heads = self.world.ledger.heads
        behind = self.draw.choice([0, 0, 0, 1, 2])
        versions = {name: max(0, head - behind) for name, head in heads.items()}
        ask = LeaseTasks(
            node=node,
            incarnation=life,
            want=want or self.draw.randint(1, 6),
            versions=versions,
            attempt=f"ask{next(self.numbers)}",
        )
        found: list[tuple[str, TaskLease, dict[str, int]]] = []
        for _ in range(self.draw.choice([1, 1, 2])):  # twice, where the reply was lost
            answer = self.call("lease_tasks", ask)
            if not isinstance(answer, RillflowError):
                found = [(node, lease, versions) for lease in answer.leases]
        self.leases += found
        return found

    def news(self, node: str, lease: TaskLease, versions: dict[str, int], reward: float | None = None) -> CompleteTask:
        played = self.policies if self.draw.random() < 0.8 else [self.draw.choice(self.policies)]
        samples: list[SampleMeta] = []
        for name in played:
            for turn in range(self.draw.choice([1, 1, 2])):
                row = Row(unit="u", segment=self.draw.randint(0, 6), offset=8 * next(self.numbers), length=8)
                one = sample(versions[name], policy=name, row=row, tokens=self.draw.randint(5, 50))
                samples.append(msgspec.structs.replace(one, agent=self.draw.choice(["", "a"]), turn=turn))
        reward = float(self.draw.choice([0, 1, lease.task.place])) if reward is None else reward
        return CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=node,
            reward=reward,
            samples=[msgspec.structs.replace(one, reward=reward if math.isfinite(reward) else 0.0) for one in samples],
            calls=self.draw.randint(1, 4),
            seconds=self.draw.choice([0.5, 2.0, 9.0]),
            metrics={"turns": float(len(samples))},
            end=self.draw.choice(["", "", "", "overlong"]),
            notes={"style": "polite"} if self.draw.random() < 0.1 else {},
            errors=[UserError(kind="workflow", where="play", error="x")] if self.draw.random() < 0.1 else [],
        )

    def complete(self) -> None:
        if not self.leases:
            return
        some = [self.draw.choice(self.leases[-20:]) for _ in range(self.draw.randint(1, 4))]
        news = [self.news(*one) for one in some]
        if len(news) == 1:
            self.call("complete", news[0])
        else:
            self.call("complete_many", news)
        self.sent |= {one.attempt: one for one in news}

    def complete_oddly(self) -> None:
        """Twice; not finite; of unknown versions; into an unknown segment or unit."""
        if not self.leases:
            return
        news = self.news(*self.draw.choice(self.leases[-20:]))
        unit, segment = self.draw.choice(["u", "v"]), self.draw.randint(0, 9)
        row = Row(unit=unit, segment=segment, offset=next(self.numbers), length=8)
        odd = [
            self.draw.choice([*self.sent.values(), news]),
            msgspec.structs.replace(news, reward=self.draw.choice([math.nan, math.inf])),
            msgspec.structs.replace(news, seconds=math.nan),
            msgspec.structs.replace(news, samples=[]),
            msgspec.structs.replace(news, samples=[msgspec.structs.replace(s, newest=99) for s in news.samples]),
            msgspec.structs.replace(news, samples=[msgspec.structs.replace(s, row=row) for s in news.samples]),
        ]
        self.call("complete_many", [self.draw.choice(odd), self.news(*self.draw.choice(self.leases[-20:]))])

    def play(self) -> None:
        """Complete all of what one lease gives, in the order of the places."""
        found = self.lease(6)
        if found:
            self.call("complete_many", [self.news(*one, reward=float(one[1].task.place)) for one in found])

    def fail(self) -> None:
        if self.leases:
            node, lease, _ = self.draw.choice(self.leases[-20:])
            cause = self.draw.choice(["timeout", "agent_error"])
            self.call("fail", FailTask(task=lease.task.id, attempt=lease.attempt, node=node, cause=cause, error="hung"))

    def wait(self) -> None:
        self.call("pass", self.draw.choice([0.5, 3.0, 11.0, 40.0]))
        self.call("unit_beat", UnitBeat(info=UnitInfo(unit="u", path="/u")))
        self.call("expire")

    def beat(self) -> None:
        node, life = self.node()
        mine = [lease.attempt for name, lease, _ in self.leases[-20:] if name == node]
        heads = self.world.ledger.heads
        self.call("pass", 0.25)
        self.call(
            "renew",
            Heartbeat(node=node, incarnation=life, attempts=mine, versions=heads, capacity=8, stats={"gpus": 1.0}),
        )

    def node_changes(self) -> None:
        node, life = self.node()
        kind = self.draw.choice(["restart", "leave", "retire", "vanish"])
        heads = self.world.ledger.heads
        if kind == "restart":
            self.lives[node] += 1
        elif kind == "leave":
            self.call("leave", LeaveRun(node=node, incarnation=life))
            self.lives[node] += 1
        elif kind == "retire":
            self.call("retire", RetireNode(node=node, drain=self.draw.choice([0.0, 5.0, 1e6])))
        else:
            for _ in range(3):
                name = f"c{next(self.numbers)}"
                self.call("renew", Heartbeat(node=name, incarnation="x", attempts=[], versions=heads, capacity=2))
        self.beat()

    # ------------------------------------------------------------ units

    def unit(self) -> None:
        info = UnitInfo(unit=self.draw.choice(["u", "u", "v"]), path="/x", load=self.draw.random())
        found = [self.draw.randint(0, 20)] if self.draw.random() < 0.3 else []
        answer = self.call("unit_beat", UnitBeat(info=info, dropped=self.drop if info.unit == "u" else [], found=found))
        if answer.idle:
            answer = self.call("unit_beat", UnitBeat(info=info, closed=answer.idle))
        self.drop = answer.drop if info.unit == "u" else self.drop

    def lose(self) -> None:
        if self.sent:
            news = self.draw.choice(list(self.sent.values())[-8:])
            self.call("lose_rows", LoseRows(rows=[one.row for one in news.samples], reason="checksum"))

    # ------------------------------------------------------------ trainers

    def join(self, policy: str, checkpoint: int, published: int = 0) -> None:
        self.joined[policy] = f"i{next(self.numbers)}"
        ask = JoinTrainer(policy=policy, incarnation=self.joined[policy], checkpoint=checkpoint, published=published)
        self.call("join_trainer", ask)
        self.lines[policy] = [version for version in self.lines[policy] if version <= checkpoint]
        self.batches.pop(policy, None)
        self.parts.pop(policy, None)

    def ask(self, policy: str, attempt: str, **more: int) -> Any:
        return self.call(
            "lease_batch",
            LeaseBatch(
                policy=policy,
                incarnation=self.joined[policy],
                attempt=attempt,
                groups=self.world.rules.policies[policy].batch_groups,
                version=self.world.ledger.heads[policy],
                wait=0,
                **more,
            ),
        )

    def serve(self) -> None:
        policy, attempt = self.draw.choice(self.policies), f"b{next(self.numbers)}"
        self.parts.pop(policy, None)
        ranks = self.draw.choice([1, 1, 2])
        for rank in range(ranks):
            answer = self.ask(policy, attempt, rank=rank, ranks=ranks)
        if not isinstance(answer, RillflowError) and answer.batch is not None:
            self.batches[policy] = answer.batch
            self.call("renew_batch", RenewBatch(batch=answer.batch.id, attempt=attempt))

    def serve_parts(self) -> None:
        policy = self.draw.choice(self.policies)
        attempt, have = self.parts.get(policy, (f"b{next(self.numbers)}", 0))
        answer = self.ask(policy, attempt, have=have, least=1)
        self.parts.pop(policy, None)
        if isinstance(answer, RillflowError) or answer.batch is None:
            return
        if answer.batch.complete:
            self.batches[policy] = answer.batch
        else:
            self.parts[policy] = (attempt, answer.batch.groups)

    def commit(self) -> None:
        policy = self.draw.choice(self.policies)
        batch = self.batches.pop(policy, None)
        if batch is None:
            self.serve()
            return
        highest = self.world.ledger.lineage.highest(policy)
        news = CommitBatch(
            policy=policy,
            incarnation=self.joined[policy],
            batch=batch.id,
            attempt=batch.attempt,
            version=highest + self.draw.choice([1, 1, 1, 2]),
            metrics={"loss": self.draw.random()},
            step_seconds=1.0,
            wait_seconds=self.draw.choice([0.0, 2.0]),
            restorable=self.draw.choice(self.lines[policy][-3:]),
        )
        if not isinstance(self.call("commit_batch", news), RillflowError):
            self.lines[policy].append(news.version)
            self.commits.append(news)

    def commit_again(self) -> None:
        if self.commits:
            self.call("commit_batch", self.draw.choice(self.commits[-3:]))

    def rejoin(self) -> None:
        policy = self.draw.choice(self.policies)
        highest = self.world.ledger.lineage.highest(policy)
        self.join(policy, self.draw.choice(self.lines[policy][-3:]), highest + self.draw.choice([0, 1]))

    def run_stage(self) -> None:
        staged = [name for name, rules in self.world.rules.policies.items() if rules.stages]
        if not staged:
            return
        if self.stage is None:
            ask = LeaseStage(policy=staged[0], stage="score", attempt=f"s{next(self.numbers)}", groups=4, wait=0)
            answer = self.call("lease_stage", ask)
            self.stage = None if isinstance(answer, RillflowError) else answer.batch
            return
        batch, self.stage = self.stage, None
        unit = self.draw.choice(["u", "u", "u", "v"])
        columns = [
            SampleColumns(sample=one.id, row=Row(unit=unit, segment=7, offset=8 * next(self.numbers), length=8))
            for one in batch.samples
        ]
        news = CommitStage(policy=batch.policy, stage="score", batch=batch.id, attempt=batch.attempt, columns=columns)
        self.call("commit_stage", news)

    # ------------------------------------------------------------ the service

    def service(self) -> None:
        kind = self.draw.choice(["advance", "write", "crash", "restart", "grace", "look", "look", "score", "score"])
        if kind == "crash":
            self.call("write")  # the acknowledged calls
        self.call(kind, *((self.draw.randint(0, 9),) if kind == "score" else ()))


def record(name: str, calls: int = CALLS) -> list[tuple[Call, Any, Any]]:
    """Drive a new ledger; the calls, their answers, and at checkpoints the view after them."""
    with tempfile.TemporaryDirectory() as folder:
        world = open_world(Path(folder), name)
        driver = Driver(world, sorted(TRACES).index(name))
        found: list[tuple[Call, Any, Any]] = []
        driver.begin()
        while len(found) < calls:
            driver.run(CHECKPOINT)
            found += [(call, told, None) for call, told in driver.calls]
            found[-1] = (*found[-1][:2], view(world))
            driver.calls.clear()
        world.close()
    return found


if __name__ == "__main__":
    FILE.write_bytes(lzma.compress(msgspec.msgpack.encode({name: record(name) for name in TRACES}), preset=9))
    print(f"{FILE}: {FILE.stat().st_size} bytes")

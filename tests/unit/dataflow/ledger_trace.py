"""Recorded traces of a ledger: every call with its answer, and all tables at checkpoints.

`python tests/unit/dataflow/ledger_trace.py` records them again, with the ledger as it is now. Do so only when a change
of behaviour is wanted, and say which in the commit. The driver draws calls of all kinds from a seed; a replay makes the
recorded calls, whatever the ledger answers. The view of a table leaves out what is not a promise: the order of rows,
the digest of a completion, the node that a pending task prefers.
"""

from __future__ import annotations

import json
import lzma
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataflow_world import World, policies, prompts, sample
from rillflow.dataflow.audit import audit
from rillflow.dataflow.hooks import Hooks
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.samplers import Replay
from rillflow.dataflow.ledger.tables import NEWEST
from rillflow.dataflow.report import status
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
    Scored,
    TaskLease,
    UnitBeat,
    UnitInfo,
    UserError,
)

FILE = Path(__file__).with_name("ledger_traces.xz")
CALLS, CHECKPOINT = 300, 60
REQUESTS = {
    "lease_tasks": LeaseTasks,
    "renew": Heartbeat,
    "retire": RetireNode,
    "leave": LeaveRun,
    "complete": CompleteTask,
    "complete_many": list[CompleteTask],
    "fail": FailTask,
    "unit_beat": UnitBeat,
    "lose_rows": LoseRows,
    "lease_batch": LeaseBatch,
    "renew_batch": RenewBatch,
    "commit_batch": CommitBatch,
    "lease_stage": LeaseStage,
    "commit_stage": CommitStage,
    "join_trainer": JoinTrainer,
}
# Options of a world by the name of its trace.
TRACES: dict[str, dict[str, Any]] = {
    "one": {"policies": {"main": {"staleness": 2}}, "kept_per_step": 1, "kept_extremes": True},
    "on_policy": {"policies": {"main": {"staleness": 0}}, "heldout": 2, "evaluate_every": 2, "repeats": 2},
    "replay": {"policies": {"main": {"staleness": 1}}, "replay": True, "group_deadline": 60.0},
    "two": {"policies": {"main": {"staleness": 1}, "other": {"staleness": 1, "batch_groups": 1}}, "heldout": 1},
    "mixed": {
        "policies": {"main": {"staleness": 2, "trains_on": ("main", "other")}, "other": {"staleness": 2}},
        "evaluate_every": 2,
        "heldout": 2,
        "grouping": "turn",
    },
    "shared": {"policies": {"main": {"staleness": 1}, "other": {"trains_on": ("main",), "batch_groups": 1}}},
    "staged": {"policies": {"main": {"staleness": 3, "stages": ("score",)}, "other": {"staleness": 1}}},
    "all": {
        "policies": {
            "main": {"staleness": 2, "stages": ("score",), "trains_on": ("main", "other")},
            "other": {"staleness": 2, "trains_on": ("main",)},
        },
        "replay": True,
        "heldout": 1,
        "evaluate_every": 3,
    },
    "scored": {"policies": {"main": {"staleness": 2}}, "group_reward": True, "heldout": 2, "evaluate_every": 2},
    "ending": {"policies": {"main": {"staleness": 1, "total_steps": 6}}, "heldout": 2, "target": 1.5, "epochs": 1},
}
VIEWS = {
    "groups": "SELECT id, lane, round, ord, prompt, planned, state, cause, started, scoring, admitted_at, ended_at "
    "FROM groups",
    "recent": "SELECT stream, grp, reward, flat, rewards, at FROM recent",
    "tally": "SELECT lane, state, cause, n FROM tally WHERE n != 0",
    "shares": "SELECT grp, producer, stream, ord, state, cause, oldest, newest, mean, std, size, samples, tokens, "
    "todo, batch, trained_into, served, held, damaged, ended_at FROM shares",
    "share_tally": "SELECT stream, state, cause, n FROM share_tally WHERE n != 0",
    "tasks": "SELECT t.id, grp, lane, round, ord, place, seed, t.state, t.cause, error, attempt, node, last_node, "
    "returned_at, leases, failures, returns, reward, given, samples, calls, seconds, metrics "
    "FROM tasks t JOIN groups g ON g.id = t.grp",
    "attempts": "SELECT id, grp || '.' || place, node, state, cause, leased_at, ended_at FROM attempts",
    "samples": "SELECT grp, place, n, policy, unit, segment, offset, length, tokens, trained, oldest, newest, reward, "
    "truncated, live, agent, turn FROM samples",
    "batches": "SELECT id, policy, attempt, incarnation, version, state, wanted, least, members, parts, complete, "
    "samples, produced, deadline, leased_at, ended_at FROM batches",
    "members": "SELECT batch, n, grp, producer, part, head, replayed FROM members",
    "stage_batches": "SELECT id, stream, stage, attempt, state, version, deadline FROM stage_batches",
    "stage_shares": "SELECT grp, producer, stream, stage, state, batch FROM stage_shares",
    "extras": "SELECT grp, producer, stream, stage, place, n, unit, segment, offset, length FROM extras",
    "policies": "SELECT name, version, highest, steps, restorable, incarnation FROM policies",
    "former": "SELECT policy, incarnation FROM former",
    "steps": "SELECT policy, version, parent, state, batch, samples, tokens, reward, staleness, step_seconds, "
    "wait_seconds, metrics, at FROM steps",
    "orphans": "SELECT policy, low, high FROM orphans",
    "nodes": "SELECT name, incarnation, state, seen, version, versions, capacity, stats, held, held_eval, ends, "
    "bad_ends, bad_row, pace, made, busy, ended_at, rate, rate_at, rate_accepted, active, leaving, leave_at, drain, "
    "leased, completed, refused, failed, returned, produced, accepted, consumed, stale FROM nodes",
    "retired": "SELECT node, incarnation FROM retired",
    "units": "SELECT unit, load, seen, state FROM units",
    "segments": "SELECT unit, segment, live, state, touched, unreported FROM segments",
    "quarantine": "SELECT unit, segment, offset, length, sample, reason, at FROM quarantine",
    "rounds": "SELECT id, step, version, state, versions, reward, episodes, failed, planned, admitted_at, ended_at "
    "FROM rounds",
    "round_sources": "SELECT round, source, reward FROM round_sources",
    "counters": "SELECT name, value FROM counters WHERE value != 0",
    "user_errors": "SELECT kind, place, error, trace, n FROM user_errors",
    "events": "SELECT seq, line FROM events",
    "meta": "SELECT key, value FROM meta WHERE key IN ('phase', 'reason', 'last_failure', 'notes', 'staleness')",
}
# Fields that answers have got since the traces were recorded; one ledger alone has nothing to say in them.
_SINCE = [("spent", False), ("part", None)]
_JSON = {"metrics", "versions", "stats", "line", "value"}
Call = tuple[str, Any]  # a name, and what it is given in plain values


def plain(value: Any) -> Any:
    """Values that can be compared: no order of keys, no NaN, and sums in any order are the same."""
    match value:
        case float():
            return "nan" if math.isnan(value) else float(f"{value:.9g}")
        case dict():
            return {str(key): plain(value[key]) for key in sorted(value, key=str)}
        case list() | tuple():
            return [plain(one) for one in value]
        case set() | frozenset():
            return sorted(plain(one) for one in value)
        case _:
            return value


def view(world: World) -> dict[str, Any]:
    """All tables of the ledger, and what its audit says."""
    found: dict[str, Any] = {}
    for name, query in VIEWS.items():
        rows = [dict(row) for row in world.ledger.db.all(query)]
        for row in rows:
            for key in _JSON & row.keys():
                row[key] = json.loads(row[key]) if isinstance(row[key], str) else row[key]
        found[name] = sorted((plain(list(row.values())) for row in rows), key=json.dumps)
    playing = {policy: world.ledger.playing.sampled(policy, -1, NEWEST) for policy in world.rules.policies}
    versions = [[group.id, policy, *group.versions[policy]] for policy, groups in playing.items() for group in groups]
    found["group_versions"] = sorted(versions, key=json.dumps)
    world.ledger.commit()
    report = audit(world.path)
    return found | {"balanced": report.balanced, "counts": plain(report.counts)}


def open_world(folder: Path, name: str) -> World:
    options = dict(TRACES[name])
    heldout, replay = options.pop("heldout", 0), options.pop("replay", False)
    sampler = {"sampler": Replay(ratio=0.5, pool=3, staleness=6)} if replay else {}
    return World(
        folder,
        source=prompts(60),
        heldout=prompts(heldout, "h") if heldout else None,
        hooks=Hooks(filters=[("zero_variance", ZeroVariance())], **sampler),
        join=False,
        policies=policies(**options.pop("policies")),
        attempts=2,
        unit_timeout=60.0,
        drop_after=20.0,
        **options,
    )


# ---------------------------------------------------------------- calls


def _score(world: World, number: int) -> Any:
    """Give the groups that wait a reward, or say that it failed."""
    ledger, answers = world.ledger, []
    for name in ledger.scoring.waiting(3):
        group = ledger.scoring.group(name)
        assert group is not None
        answers.append((name, [(one.place, one.attempt, one.given) for one in group.episodes]))
        if number % 4 == 0:
            ledger.fail_group(group, "no judge")
        else:
            ledger.score_group(group, [Scored(n / 2, {"style": 1.0}) for n, _ in enumerate(group.episodes)])
    return answers


def _kept(world: World, news: CommitBatch) -> Any:
    return [(one.id, one.kept, one.step, one.reward, len(one.samples)) for one in world.ledger.kept.of_step(news)]


def _look(world: World) -> Any:
    """Read the status as people and supervisors do."""
    ledger = world.ledger
    return {
        "status": msgspec.to_builtins(status(ledger, [])),
        "nodes": [msgspec.to_builtins(node) for node in ledger.nodes.infos()],
        "waits": [ledger.waiting_for(policy, 2) for policy in ledger.rules.policies],
        "why": ledger.why_no_tasks("n0", ledger.heads),
        "wanted": [ledger.evaluations.wanted(policy) for policy in ledger.rules.policies],
        "balance": msgspec.to_builtins(ledger.balances.now()),
        "units": [unit.unit for unit in ledger.units().units],
        "rounds": ledger.kept.ended_rounds(-1),
        "of_rounds": [[one.id for one in ledger.kept.of_round(n)] for n in ledger.kept.ended_rounds(-1)],
    }


def _pass(world: World, seconds: float) -> None:
    world.clock.time += seconds


def _restart(world: World) -> None:
    world.ledger.close()
    world.ledger = world.open()


OTHERS: dict[str, Callable[..., Any]] = {
    "pass": _pass,
    "expire": lambda world: world.ledger.expire(),
    "advance": lambda world: world.ledger.advance(),
    "grace": lambda world: world.ledger.grace(),
    "write": lambda world: world.ledger.commit(),
    "crash": lambda world: world.crash(),
    "restart": _restart,
    "score": _score,
    "look": _look,
    "stop": lambda world, reason: world.ledger.stop(reason),
}


def make(world: World, call: Call) -> tuple[Any, Any]:
    """Make one call; returns the ledger's answer, and the same in plain values."""
    name, given = call
    if name in OTHERS:
        found = OTHERS[name](world, *given)
        return found, plain(found)
    request = msgspec.convert(given, REQUESTS[name])
    try:
        answer = getattr(world.ledger, name)(request)
    except RillflowError as error:
        return error, type(error).__name__
    if name == "complete_many":
        told = [type(one).__name__ if isinstance(one, RillflowError) else msgspec.to_builtins(one) for one in answer]
        return answer, plain(told)
    told = plain({key: value for key, value in msgspec.to_builtins(answer).items() if (key, value) not in _SINCE})
    if name == "commit_batch":
        told = [told, plain(_kept(world, request))]
    return answer, told


# ---------------------------------------------------------------- the driver


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


# ---------------------------------------------------------------- recording and replaying


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


def replay(name: str, trace: list[Any]) -> Iterator[tuple[int, str, Any, Any]]:
    """Make the recorded calls; yields where an answer or a table differs: number, what, before, now."""
    with tempfile.TemporaryDirectory() as folder:
        world = open_world(Path(folder), name)
        for number, ((call, given), told, tables) in enumerate(trace):
            _, now = make(world, (call, given))
            if json.dumps(now) != json.dumps(told):
                yield number, call, told, now
            if tables is not None:
                found = view(world)
                for table, before in tables.items():
                    if json.dumps(found[table]) != json.dumps(before):
                        yield number, table, before, found[table]
        world.close()


def load() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = msgspec.msgpack.decode(lzma.decompress(FILE.read_bytes()))
    return found


if __name__ == "__main__":
    FILE.write_bytes(lzma.compress(msgspec.msgpack.encode({name: record(name) for name in TRACES}), preset=9))
    print(f"{FILE}: {FILE.stat().st_size} bytes")

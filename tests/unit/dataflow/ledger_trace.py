"""Recorded traces of a ledger: every call with its answer, and all tables at checkpoints.

`ledger_driver` records them. A replay makes the recorded calls, whatever the ledger answers. The view of a table leaves
out what is not a promise: the order of rows, the digest of a completion, the node that a pending task prefers.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from dataflow_world import World, policies, prompts
from rillflow.dataflow.audit import audit
from rillflow.dataflow.hooks.filters import ZeroVariance
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.hooks.samplers import Replay
from rillflow.dataflow.ledger.tables import NEWEST
from rillflow.dataflow.report import status
from rillflow.errors import RillflowError
from rillflow.types import (
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
    Scored,
    UnitBeat,
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


# ---------------------------------------------------------------- replaying


def replay(name: str, trace: list[Any]) -> Iterator[tuple[int, str, Any, Any]]:
    """Make the recorded calls; yields where an answer or a table differs: number, what, before, now."""
    with tempfile.TemporaryDirectory() as folder:
        world = open_world(Path(folder), name)
        for number, ((call, given), recorded, tables) in enumerate(trace):
            _, now = make(world, (call, given))
            told = _in_todays_words(recorded)
            if json.dumps(now) != json.dumps(told):
                yield number, call, told, now
            if tables is not None:
                found = view(world)
                for table, before in tables.items():
                    if json.dumps(found[table]) != json.dumps(before):
                        yield number, table, before, found[table]
        world.close()


def _in_todays_words(told: Any) -> Any:
    """Return an answer with the words that were changed since it was recorded: one node is no longer "1 nodes"."""
    return json.loads(re.sub(r"\b1 (task|node)s", r"1 \1", json.dumps(told)))


def load() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = msgspec.msgpack.decode(lzma.decompress(FILE.read_bytes()))
    return found

"""The state of a maintainer on disk, the pool as it sees it, and the size that a report asks for.

RUN/maintainer.json is written before the actions are carried out: the next maintainer continues or undoes a start or a
retirement that was interrupted. A line of RUN/maintainer.jsonl is in the state before it is in the log, and the next
maintainer adds it if it is missing there: every decision has exactly one line.

The pool joins the view that the run has of its nodes with that of the executor. Every node has exactly one standing.
Only `starting` and `here` count: the others are leaving or gone.

The target of a report is the three-zone rule of `dataflow.balance.decide`, applied to what the pool could produce. The
published rule compares consumed with produced samples, for pools that produce as fast as they can. Here admission is
capped: a pool that is too large does not overproduce, its nodes are idle, and the two counts are equal. So the samples
that nodes would have made in their idle time count as produced (`entered / busy`). Idle capacity is weaker evidence
than surplus samples: by idleness alone a pool shrinks by at most a quarter at once, and not to a size at which the
trainer has starved recently.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rillflow.dataflow.balance import STARVING, decide
from rillflow.errors import CorruptData
from rillflow.storage import disk_errors, write_atomic
from rillflow.types import NodeInfo
from rillflow.types.balance import Branch, NodeReport, Report
from rillflow.types.base import json_decoder

FORMAT = 1
Action = Literal["begin", "grow", "shrink", "hold", "start", "joined", "failed", "stopped", "died", "refused"]


class Asked(NamedTuple):
    """The request of a version's report; `target` is in GPUs. The default stands for no report."""

    version: int = -1
    branch: str = ""
    target: int | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One decision or action. `version` is that of its report (-1: none), `branch` and `target` (in GPUs) are the
    report's request, `size` is the number of nodes and `wanted` the number to reach."""

    number: int
    time: float
    action: Action
    why: str
    size: int
    wanted: int | None
    version: int = -1
    branch: str = ""
    target: int | None = None
    nodes: list[str] = []
    by: str = "loop"
    dry_run: bool = False


class Own(msgspec.Struct):
    """A node of the executor: when its start began, how many starts had failed before it, when it joined, until when it
    may drain."""

    since: float
    attempt: int = 0
    joined: float | None = None
    leaving: float | None = None


class State(msgspec.Struct):
    """`report` is the version of the last report that was decided on, `target` the number of nodes to reach, `changed`
    the time of its last change, `number` the next node's number, `failures` the starts that failed in a row. `rates`
    are the nodes' samples a second and GPU in the last reports; `starved` is the size at which the trainer starved,
    with the number of reports for which it is remembered; `released` are the run's own workers whose `rollout` was
    taken away."""

    format: int = FORMAT
    report: int = -1
    target: int | None = None
    changed: float | None = None
    number: int = 0
    nodes: dict[str, Own] = msgspec.field(default_factory=dict)
    failures: int = 0
    retry: float = 0.0
    rates: dict[str, list[float]] = msgspec.field(default_factory=dict)
    starved: int = 0
    remembered: int = 0
    released: list[str] = msgspec.field(default_factory=list)
    lines: int = 0
    line: Line | None = None

    @property
    def starting(self) -> list[str]:
        return [name for name, own in self.nodes.items() if own.joined is None and own.leaving is None]

    @property
    def leaving(self) -> list[str]:
        return [name for name, own in self.nodes.items() if own.leaving is not None]


class Book:
    """The two files of one maintainer, in one folder. One process uses them at a time (the caller holds the lock)."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "maintainer.json"
        self._log = folder / "maintainer.jsonl"
        self.state = self._read()
        self._mend()

    def commit(self, line: Line | None = None) -> None:
        """Write the state, and with it the line."""
        if line is not None:
            self.state.lines, self.state.line = line.number + 1, line
        write_atomic(self._path, msgspec.json.format(msgspec.json.encode(self.state), indent=2) + b"\n")
        if line is not None:
            self._append(line)

    def lines(self, last: int) -> list[Line]:
        """The newest ones, oldest first."""
        if not self._log.is_file():
            return []
        raw = self._log.read_bytes().splitlines()[-last:]
        return [json_decoder(Line).decode(line) for line in raw]

    def _read(self) -> State:
        if not self._path.is_file():
            return State()
        try:
            state = json_decoder(State).decode(self._path.read_bytes())
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{self._path} cannot be read: {error}",
                "remove it: a new maintainer then adopts the nodes that its executor still has",
            ) from error
        if state.format != FORMAT:
            raise CorruptData(
                f"{self._path} has format {state.format}, this version reads {FORMAT}",
                "use the version of rillflow that wrote it, or remove it",
            )
        return state

    def _mend(self) -> None:
        """Truncate a torn last line, and add the line of the state if it is missing."""
        if self._log.is_file():
            data = self._log.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                with disk_errors(self._log):
                    os.truncate(self._log, whole)
        line = self.state.line
        last = self.lines(1)
        if line is not None and (not last or last[0].number < line.number):
            self._append(line)

    def _append(self, line: Line) -> None:
        with disk_errors(self._log), open(self._log, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())


# ---------------------------------------------------------------- the pool

# own: the executor's; run: a worker of the run that may be taken away; other: hosted by a trainer, or started by hand
Kind = Literal["own", "run", "other"]
Standing = Literal["starting", "here", "leaving", "gone"]


@dataclass(frozen=True)
class Member:
    """One node. `suspect` as the last report says; `rate` is its mean throughput a GPU over the last reports."""

    name: str
    kind: Kind
    standing: Standing
    gpus: int = 1
    suspect: bool = False
    rate: float | None = None

    @property
    def counts(self) -> bool:
        return self.standing in ("starting", "here")


def members(
    state: State,
    infos: Sequence[NodeInfo],
    report: Report | None,
    workers: Collection[str],
    expected: Collection[str] = (),
) -> list[Member]:
    """Return the members of the pool. `workers` are the run's own nodes that may be taken away; `expected` are those
    that have not joined yet (after the start of a run)."""
    rows = {row.id: row for row in report.nodes} if report else {}
    found = [_member(info, state, rows.get(info.name), workers) for info in infos]
    known = {member.name for member in found}
    for name in state.nodes:
        if name not in known:
            leaving = state.nodes[name].leaving is not None
            found.append(Member(name, "own", "leaving" if leaving else "starting"))
    found += [Member(name, "run", "starting") for name in expected if name not in known]
    return found


def _member(info: NodeInfo, state: State, row: NodeReport | None, workers: Collection[str]) -> Member:
    own = state.nodes.get(info.name)
    kind: Kind = "own" if own else "run" if info.name in workers else "other"
    rates = state.rates.get(info.name)
    return Member(
        info.name,
        kind,
        _standing(info, state),
        gpus=row.gpus if row else 1,
        suspect=row is not None and row.state == "suspect",
        rate=sum(rates) / len(rates) if rates else None,
    )


def _standing(info: NodeInfo, state: State) -> Standing:
    own = state.nodes.get(info.name)
    if info.leaving or (own is not None and own.leaving is not None) or info.name in state.released:
        return "leaving"
    if info.state != "healthy":
        return "gone"
    # A node without weights sends heartbeats but plays nothing yet.
    return "here" if info.versions else "starting"


def size(pool: Sequence[Member]) -> int:
    return sum(member.counts for member in pool)


def nodes_for(gpus: int, pool: Sequence[Member]) -> int:
    """Return how many nodes have at least `gpus` GPUs, if new nodes are like the present ones."""
    here = [member.gpus for member in pool if member.standing == "here"]
    each = sum(here) / len(here) if here else 1.0
    return math.ceil(round(gpus / each, 9))


@dataclass
class Busy:
    """The share of the nodes' capacity that was in use, sampled at even intervals."""

    held: int = 0
    room: int = 0
    looks: int = 0

    def look(self, infos: Sequence[NodeInfo]) -> None:
        playing = [
            i for i in infos if i.state == "healthy" and not i.leaving and i.capacity > 0 and i.active == "rollout"
        ]
        if playing:
            self.held += sum(min(info.held, info.capacity) for info in playing)
            self.room += sum(info.capacity for info in playing)
            self.looks += 1

    def share(self, fewest: int = 2) -> float | None:
        """Return the mean share, or None if there were too few samples."""
        return self.held / self.room if self.looks >= fewest else None


def keep_rates(rates: Mapping[str, list[float]], report: Report, window: int = 3) -> dict[str, list[float]]:
    """Return the throughput in the last `window` reports, including this one, of the nodes that it names."""
    return {
        row.id: [*rates.get(row.id, []), row.throughput_per_gpu][-window:]
        for row in report.nodes
        if row.state != "gone"
    }


# ---------------------------------------------------------------- the rule


MOST_AT_ONCE = 0.25  # of the pool that is retired by idleness alone
_LEAST_BUSY = 0.01  # samples entered, so nodes were at work, if only between two observations
REMEMBERED = 5  # reports for which a size at which the trainer starved is not gone back to


@dataclass(frozen=True)
class Wish:
    """The target in GPUs. `idle` says that it follows from idle nodes, not from surplus samples."""

    branch: Branch
    target: int
    why: str
    idle: bool = False


def wish(report: Report, busy: float | None) -> Wish:
    """Return the target of a report. `busy` is the share of the nodes' capacity in use during its window, or None."""
    plain, made, waiting = report.decision, report.production, report.window.wait_fraction
    share = "is unknown" if waiting is None else f"{waiting:.0%}"
    if plain.branch != "hold" or busy is None or not made.entered:
        return Wish(plain.branch, plain.target, f"{plain.branch}: the trainer's wait {share}, {_flow(report)}")
    could = math.ceil(made.entered / min(max(busy, _LEAST_BUSY), 1.0))
    wanted = decide(made.gpus, waiting, could, made.consumed)
    if wanted.branch == "hold":
        return Wish("hold", made.gpus, f"hold: the trainer's wait {share}, nodes busy {busy:.0%}")
    target = max(wanted.target, made.gpus - max(int(made.gpus * MOST_AT_ONCE), 1))
    return Wish(
        "shrink",
        target,
        f"shrink: the trainer's wait {share}, and nodes were busy {busy:.0%} of the time: "
        f"{wanted.target} GPUs would do",
        idle=True,
    )


def starves(report: Report) -> bool:
    waiting = report.window.wait_fraction
    return waiting is not None and waiting > STARVING


def _flow(report: Report) -> str:
    made = report.production
    return f"{made.entered} samples entered, {made.consumed} consumed"


def victims(pool: Sequence[Member], count: int, spare_gpus: int, *, keep_of_run: int = 1) -> list[Member]:
    """Return at most `count` nodes with at most `spare_gpus` GPUs. `keep_of_run` of the run's own nodes always stay."""
    chosen: list[Member] = []
    run_left = sum(member.kind == "run" and member.counts for member in pool)
    for member in sorted((m for m in pool if m.counts and m.kind != "other"), key=_order):
        if len(chosen) == count:
            break
        if member.gpus > spare_gpus or (member.kind == "run" and run_left <= keep_of_run):
            continue
        chosen.append(member)
        spare_gpus -= member.gpus
        run_left -= member.kind == "run"
    return chosen


def _order(member: Member) -> tuple[bool, bool, float, int, str]:
    """Return the sort key: own nodes first, then suspects, then the slowest. A node without samples is not slow."""
    rate = member.rate if member.rate is not None else float("inf")
    return member.kind != "own", not member.suspect, rate, -_number(member.name), member.name


def _number(name: str) -> int:
    tail = name.rsplit("-", 1)[-1]
    return int(tail) if tail.isdecimal() else -1

"""The balance report: whether the pool of rollout nodes fits what the trainer takes, and which size would.

Made from plain rows (steps, evaluation rounds, nodes) between a mark and a look; nothing here reads a ledger or a
clock. Counts are of samples. A step's time is all of it, the wait for its batch included. A step during which an
evaluation was played says nothing about the balance of training: it is left out of the averages and of the wait
fraction. If no step is left the wait fraction is unknown and the decision is to hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
from msgspec.structs import replace

from rillflow.dataflow.ledger.tables import SUM
from rillflow.types import Wire
from rillflow.types.balance import Balance, Branch, Decision, NodeReport, NodeState, Production, Report, Window

STARVING = 0.10  # the trainer waits for more than this share of its time: grow
SATED = 0.05  # it waits for less than this: shrink, if more is made than is taken
MARGIN = 1.10  # kept above what is taken when the pool shrinks
MOST_WAITING = 0.95  # so that one report asks for at most twenty times the pool


class Counts(Wire, frozen=True):
    """The totals of a node since it joined."""

    completed: int = 0
    failed: int = 0
    produced: int = 0
    accepted: int = 0
    consumed: int = 0
    stale: int = 0


class Mark(Wire, frozen=True):
    """Where a window begins: the counters as they stood.

    `down` are the seconds since in which no service ran; `opened` is when one was last started.
    """

    time: float
    version: int
    entered: int = 0
    nodes: dict[str, Counts] = msgspec.field(default_factory=dict)
    opened: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class Step:
    """A committed step; `seconds` are its own, without the wait."""

    version: int
    time: float
    seconds: float
    wait: float


@dataclass(frozen=True)
class Span:
    """From when to when an evaluation was played."""

    start: float
    end: float


@dataclass(frozen=True)
class NodeLook:
    """A node as it is now; `seen` is when it was last heard of."""

    name: str
    seen: float
    gone: bool
    gpus: int
    version: int | None
    counts: Counts


@dataclass(frozen=True)
class Look:
    """The run as it stands at `time`: steps since the mark, rounds that touch the window, every node ever heard of,
    those which went long ago as one.

    `settled` is the version before the newest: a node below it has not finished an earlier transfer of weights.
    """

    time: float
    version: int
    settled: int
    entered: int
    steps: Sequence[Step]
    rounds: Sequence[Span]
    nodes: Sequence[NodeLook]


# ---------------------------------------------------------------- the rule


def wait_fraction(steps: Iterable[Step]) -> float | None:
    """The share of the steps' time that was spent waiting for a batch, at most 0.95; None if no time has passed."""
    waited = total = 0.0
    for step in steps:
        waited += max(step.wait, 0.0)
        total += max(step.wait, 0.0) + max(step.seconds, 0.0)
    return min(waited / total, MOST_WAITING) if total > 0 else None


def decide(gpus: int, waiting: float | None, entered: int, consumed: int, *, weight_transfer: bool = False) -> Decision:
    """The three-zone rule. A trainer that starves asks for more, one that is sated for what it takes and a tenth.

    A zone that names the present size holds.
    """
    target = gpus
    if waiting is not None and gpus > 0:
        if waiting > STARVING:
            target = _ceil(gpus / (1 - waiting))
        elif waiting < SATED and entered > 0 and consumed > 0:
            target = min(gpus, _ceil(gpus * consumed / entered * MARGIN))
    delta = target - gpus
    branch: Branch = "grow" if delta > 0 else "shrink" if delta < 0 else "hold"
    return Decision(branch=branch, target=target, delta=delta, weight_transfer=weight_transfer)


def _ceil(value: float) -> int:
    """Rounded up, but not for the last bits of a quotient: 1 / (1 - 0.9) is 10, not 11."""
    return math.ceil(round(value, 9))


# ---------------------------------------------------------------- the report


def make_report(policy: str, mark: Mark, look: Look) -> Report:
    """What happened between the mark and the look, and what follows from it. Nodes long gone have no row."""
    window = _window(mark, look)
    made = _made(mark, look)
    production = _production(mark, look, list(made.values()), window.wall_seconds)
    decision = decide(
        production.gpus,
        window.wait_fraction,
        production.entered,
        production.consumed,
        weight_transfer=any(_lags(node, look.settled) for node in look.nodes),
    )
    states = _states(mark, look.nodes, made)
    return Report(
        policy=policy,
        version=look.version,
        time=look.time,
        window=window,
        production=production,
        decision=decision,
        nodes=[
            _node_report(node, made[node.name], window.wall_seconds, states[node.name])
            for node in look.nodes
            if node.name != SUM and (not node.gone or node.seen >= mark.time)
        ],
    )


def _made(mark: Mark, look: Look) -> dict[str, Counts]:
    """What each node has done since the mark. Nodes that were summed up since then count as part of the sum."""
    names = {node.name for node in look.nodes}
    summed = [counts for name, counts in mark.nodes.items() if name == SUM or name not in names]
    before = mark.nodes | {
        SUM: Counts(**{name: sum(getattr(counts, name) for counts in summed) for name in Counts.__struct_fields__})
    }
    return {node.name: _since(node.counts, before.get(node.name, Counts())) for node in look.nodes}


def mark_of(look: Look) -> Mark:
    """The next window begins where this look was taken."""
    return Mark(
        time=look.time,
        version=look.version,
        entered=look.entered,
        nodes={node.name: node.counts for node in look.nodes},
    )


def _window(mark: Mark, look: Look) -> Window:
    counted = [step for step in look.steps if not _spans_evaluation(step, look.rounds)]
    wall = max(look.time - mark.time - mark.down, 0.0)
    evaluating = min(_covered(look.rounds, mark.time, look.time), wall)
    return Window(
        since=mark.version,
        steps=len(look.steps),
        counted=len(counted),
        wall_seconds=wall,
        eval_seconds=evaluating,
        training_seconds=wall - evaluating,
        step_seconds=_ratio(sum(step.seconds + step.wait for step in counted), len(counted)),
        batch_wait_seconds=_ratio(sum(step.wait for step in counted), len(counted)),
        wait_fraction=wait_fraction(counted),
    )


def _spans_evaluation(step: Step, rounds: Sequence[Span]) -> bool:
    start = step.time - step.seconds - step.wait
    return any(span.start < step.time and start < span.end for span in rounds)


def _covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds between `start` and `end` that lie in at least one span."""
    covered, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        until = min(span.end, end)
        covered += max(until - max(span.start, reached), 0.0)
        reached = max(reached, until)
    return covered


def _production(mark: Mark, look: Look, made: Sequence[Counts], wall: float) -> Production:
    gpus = sum(node.gpus for node in look.nodes if not node.gone)
    produced = sum(counts.produced for counts in made)
    entered = max(look.entered - mark.entered, 0)
    consumed = sum(counts.consumed for counts in made)
    stale = sum(counts.stale for counts in made)
    return _produced(gpus, wall, produced=produced, entered=entered, consumed=consumed, stale=stale)


def _produced(gpus: int, wall: float, *, produced: int, entered: int, consumed: int, stale: int) -> Production:
    return Production(
        gpus=gpus,
        produced=produced,
        entered=entered,
        accept_rate=_ratio(entered, produced),
        consumed=consumed,
        stale_skipped=stale,
        stale_rate=_ratio(stale, produced),
        throughput_per_gpu=_throughput(produced, gpus, wall),
        produce_consume_ratio=_ratio(entered, consumed),
    )


# ---------------------------------------------------------------- nodes


def _node_report(node: NodeLook, made: Counts, wall: float, state: NodeState) -> NodeReport:
    return NodeReport(
        id=node.name,
        gpus=node.gpus,
        produced=made.produced,
        accepted=made.accepted,
        accept_rate=_ratio(made.accepted, made.produced),
        throughput_per_gpu=_throughput(made.produced, node.gpus, wall),
        state=state,
    )


def _states(mark: Mark, nodes: Sequence[NodeLook], made: dict[str, Counts]) -> dict[str, NodeState]:
    """A node is suspect when most of its episodes fail, or when it makes less than half the median a GPU.

    One that came during the window has had less time than the others: its pace is not judged.
    """
    pace = {
        node.name: made[node.name].produced / node.gpus for node in nodes if not node.gone and node.name in mark.nodes
    }
    slow = median(pace.values()) / 2 if pace else 0.0

    def state(node: NodeLook) -> NodeState:
        if node.gone:
            return "gone"
        counts = made[node.name]
        failing = counts.failed > counts.completed
        return "suspect" if failing or pace.get(node.name, slow) < slow else "healthy"

    return {node.name: state(node) for node in nodes}


def _lags(node: NodeLook, settled: int) -> bool:
    return not node.gone and (node.version is None or node.version < settled)


def _since(now: Counts, before: Counts) -> Counts:
    return Counts(**{name: max(getattr(now, name) - getattr(before, name), 0) for name in Counts.__struct_fields__})


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _throughput(samples: int, gpus: int, seconds: float) -> float:
    return samples / (gpus * seconds) if gpus > 0 and seconds > 0 else 0.0


# ---------------------------------------------------------------- several ledgers


def joined(balances: Sequence[Balance]) -> Balance:
    """Return the balance of a run from those of its ledgers, the first one's first."""
    latest = [one.latest for one in balances if one.latest is not None]
    current = join_reports([one.current for one in balances])
    return Balance(latest=join_reports(latest) if latest else None, current=current)


def join_reports(reports: Sequence[Report]) -> Report:
    """Return the report of a run from those of its ledgers, the first one's first.

    Every ledger has all steps and all nodes; each has its own samples. The first ledger has the evaluations."""
    first = reports[0]
    if len(reports) == 1:
        return first
    production = _join_production([report.production for report in reports], first.window.wall_seconds)
    nodes: dict[str, list[NodeReport]] = {}
    for node in (node for report in reports for node in report.nodes):
        nodes.setdefault(node.id, []).append(node)
    return replace(
        first,
        production=production,
        decision=decide(
            production.gpus,
            first.window.wait_fraction,
            production.entered,
            production.consumed,
            weight_transfer=any(report.decision.weight_transfer for report in reports),
        ),
        nodes=[_join_node(found, first.window.wall_seconds) for found in nodes.values()],
    )


def _join_production(parts: Sequence[Production], wall: float) -> Production:
    gpus = max(part.gpus for part in parts)
    produced, entered = sum(part.produced for part in parts), sum(part.entered for part in parts)
    consumed, stale = sum(part.consumed for part in parts), sum(part.stale_skipped for part in parts)
    return _produced(gpus, wall, produced=produced, entered=entered, consumed=consumed, stale=stale)


def _join_node(parts: Sequence[NodeReport], wall: float) -> NodeReport:
    """A node is gone, or suspect, when every ledger that knows it says so."""
    produced, accepted = sum(part.produced for part in parts), sum(part.accepted for part in parts)
    alive = [part.state for part in parts if part.state != "gone"]
    state: NodeState = "gone" if not alive else "healthy" if "healthy" in alive else "suspect"
    return replace(
        parts[0],
        produced=produced,
        accepted=accepted,
        accept_rate=_ratio(accepted, produced),
        throughput_per_gpu=_throughput(produced, parts[0].gpus, wall),
        state=state,
    )

"""Which tasks a node gets: those whose tokens can still be trained when they come back.

A node that is too far behind in any policy, or on a version that died, gets none, nor does one that leaves. Tasks of
one group go to the node that plays the group already, for its prefix cache, as long as it keeps up. A node gets tasks
of other groups before it idles, unless it is so slow that the others finish them sooner. Evaluations take at most half
of what a node holds while training tasks are pending; runs that wait for them anyway (on-policy, finishing) play them
first. Writes no table: `tasks` does.

The second half computes how many tasks a node may hold: fewer when it fails more than others, is slower, or has older
weights. It is pure arithmetic over the ledger's records of nodes. Failures and speed are compared with the others': if
all fail, or a node is alone, no other node could take its tasks.

A slow node that is full adds what it can, so it is left alone as long as there is work for everybody. Otherwise a task
in its hands is one that a quick node lacks:

    a stream without end   it holds its share of all that is under way or waits, by samples a second and in whole groups
                           (one task of it would hold a group up); more only of what the others have no room for
    a set with an end      (on-policy, the last evaluation) it takes what the others would not have finished before it
                           does: the set does not wait for the last task of a slow node

So a slow node may get none while others have free hands. Its record fades while it idles, until it is tried again:
nothing else shows that it has recovered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import median

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.evaluations import Evaluations
from rillflow.dataflow.ledger.groups import Groups
from rillflow.dataflow.ledger.nodes import TAKING, Nodes
from rillflow.dataflow.ledger.playing import Playing
from rillflow.dataflow.ledger.streams import Streams
from rillflow.dataflow.ledger.tables import Node
from rillflow.dataflow.ledger.tables import Task as TaskRow
from rillflow.dataflow.ledger.tasks import Tasks
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import Task, TaskLease

# ---------------------------------------------------------------- which tasks

Versions = Mapping[str, int]


class Leasing(Part):
    def __init__(
        self,
        base: Base,
        *,
        groups: Groups,
        playing: Playing,
        tasks: Tasks,
        evaluations: Evaluations,
        lineage: Lineage,
        nodes: Nodes,
        streams: Streams,
    ) -> None:
        super().__init__(base)
        self._groups = groups
        self._playing = playing
        self._tasks = tasks
        self._evaluations = evaluations
        self._lineage = lineage
        self._nodes = nodes
        self._streams = streams

    def repeat(self, node: str, ask: str) -> list[TaskLease]:
        """Return the leases that the request `ask` gave to the node and that it still holds, with their full time."""
        rows = self._tasks.repeat(node, ask)
        return self._leases(rows, [row.attempt or "" for row in rows]) if rows else []

    def lease(self, node: str, versions: Versions, want: int, *, ask: str, training: bool) -> list[TaskLease]:
        """Lease up to `want` tasks that a node on these versions may play; `ask` is the request's attempt id."""
        me = self._nodes.find(node)
        if me is None or me.leaving or self._unfit(versions):
            return []
        allowed = self.allowance(me, versions, want, training=training)
        want = min(want, max(0, allowed.tasks - me.held)) if allowed.why else want
        half = training and not self._rules.on_policy
        room = min(want, max(0, (me.held + want + 1) // 2 - me.held_eval)) if half else want
        taking = self._nodes.taking
        rows = self._pending_eval(node, versions, room, taking)
        leases = self._lease(rows, node, ask)
        if len(leases) < want and self._too_old(versions) is None:
            leases += self._lease(self._pending_train(node, versions, want - len(leases), taking), node, ask)
        if half and len(leases) < want:
            leases += self._lease(self._pending_eval(node, versions, want - len(leases), taking), node, ask)
        return leases

    def _lease(self, rows: Sequence[TaskRow], node: str, ask: str) -> list[TaskLease]:
        if not rows:
            return []
        attempts = self._tasks.lease(rows, node, ask)
        self._groups.started(dict.fromkeys(row.grp for row in rows))
        return self._leases(rows, attempts)

    def _leases(self, rows: Sequence[TaskRow], attempts: Sequence[str]) -> list[TaskLease]:
        prompts, seconds = self._groups.prompts({row.grp for row in rows}), self._rules.task_lease
        return [
            TaskLease(
                task=Task(
                    id=row.id,
                    prompt=prompts[row.grp],
                    group=row.grp,
                    place=row.place,
                    lane=row.lane,
                    seed=row.seed,
                ),
                attempt=attempt,
                seconds=seconds,
            )
            for row, attempt in zip(rows, attempts, strict=True)
        ]

    # ------------------------------------------------------------ how many

    def allowance(self, me: Node, versions: Versions, want: int, *, training: bool) -> Allowance:
        """Return how many tasks the node may hold, by how old its oldest weights are and how it has done so far. The
        capacity of a node that has not reported one is what it holds and wants."""
        heads = self._lineage.heads
        ages = [(max(0, heads[p] - versions[p]), b) for p in heads if (b := self._bound(p)) is not None]
        behind, bound = max(ages, key=lambda age: age[0] / (age[1] + 1), default=(0, 0))
        mine = self._look(me, want) if _takes(me) else NodeLook(want)
        if mine.bad_row < PROBE_AFTER and mine.failing == 0 and not self._may_be_slow(me, mine):
            return allowance(mine, [], Work(0), behind=behind, bound=bound)  # the others make no difference
        query = f"SELECT {Node.columns()} FROM nodes WHERE {TAKING} AND name != ?"
        others = [self._look(other, want) for other in self._db.rows(Node, query, (me.name,))]
        # It takes long to count the work there is: only a slow node's allowance depends on it.
        work = self._work(training) if is_slow(mine, others) else Work(0)
        return allowance(mine, others, work, behind=behind, bound=bound)

    def _may_be_slow(self, me: Node, mine: NodeLook) -> bool:
        """Return whether the node is slower than is usual, before its record fades."""
        if not mine.pace or not mine.speed:
            return False
        query = f"SELECT made / busy FROM nodes WHERE {TAKING} AND name != ? AND pace > 0 AND made > 0 AND busy > 0"
        speeds = self._db.column(query, (me.name,))
        return bool(speeds) and mine.speed * SLOW < median(speeds)

    def _work(self, training: bool) -> Work:
        return Work(self._tasks.pending, self._rules.group_size, ends=self._rules.on_policy or not training)

    def _look(self, node: Node, want: int) -> NodeLook:
        return NodeLook(
            node.capacity or node.held + want,
            node.ends,
            node.bad_ends,
            node.bad_row,
            node.pace,
            node.made / node.busy if node.made > 0 and node.busy > 0 else None,
            node.held,
            self._clock.now() - node.ended_at if node.ended_at is not None else 0.0,
        )

    # ------------------------------------------------------------ versions

    def _bound(self, producer: str) -> int | None:
        """How many versions behind the producer's tokens may be for every stream that wants them; None: any."""
        wanted = set(self._lineage.unfinished()) & set(self._rules.streams_of(producer))
        return min((self._rules.policies[stream].staleness for stream in wanted), default=None)

    def _unfit(self, versions: Versions) -> str:
        """The policy of which the node serves no live version, if there is one."""
        for policy in self._rules.policies:
            version = versions.get(policy)
            if version is None or self._lineage.died(policy, version, version):
                return policy
        return ""

    def _too_old(self, versions: Versions) -> str | None:
        """Why the node's tokens could not be trained, if so.

        On-policy, weights that are published but not committed yet are not the policy.
        """
        for policy, head in self._lineage.heads.items():
            bound, behind = self._bound(policy), head - versions[policy]
            if bound is not None and (behind != 0 if bound == 0 else behind > bound):
                return f"it is at version {versions[policy]}, the trainer at {head}, and the bound is {bound}"
        return None

    def why_none(self, node: str, versions: Versions, *, training: bool) -> str:
        """Return what a node that gets no task waits for."""
        me = self._nodes.find(node)
        if me is not None and me.leaving:
            return "the end of its episodes: it leaves"
        if policy := self._unfit(versions):
            return f"weights: it serves no live version of {policy}"
        if old := self._too_old(versions):
            return f"weights: {old}"
        pending = self._tasks.any_pending
        if pending and me is not None and (held := self.allowance(me, versions, 1, training=training)).why:
            return f"its episodes: {held.why}"
        if pending:
            return "weights: the pending tasks need a newer version, or another node"
        return self._streams.fullness()

    # ------------------------------------------------------------ pending tasks

    def _pending_eval(self, node: str, versions: Versions, want: int, taking: int) -> list[TaskRow]:
        rounds = self._evaluations.playable(versions) if want > 0 else []
        if not rounds:
            return []
        return list(islice(self._fitting(self._playing.pending("eval", rounds=rounds), node, taking), want))

    def _pending_train(self, node: str, versions: Versions, want: int, taking: int) -> list[TaskRow]:
        end = self._streams.window_end(versions)
        everywhere = self._fitting(self._playing.pending("train", until=end), node, taking)
        if self._rules.on_policy or taking < 2:
            return list(islice(everywhere, want))
        own = self._fitting(self._playing.pending("train", node, until=end), node, taking)
        new = self._fitting(self._playing.pending("train", None, until=end), node, taking)
        others = (task for task in everywhere if task.home not in (None, node))  # rather another's group than nothing
        return list(islice(chain(own, new, others), want))

    def _fitting(self, tasks: Iterator[TaskRow], node: str, taking: int) -> Iterator[TaskRow]:
        """Yield the tasks that the node may get. One that went wrong on it is left to another for a while, when there
        is one."""
        if taking < 2:
            return tasks
        since = self._clock.now() - self._rules.node_timeout
        return (task for task in tasks if task.last_node != node or not task.returned_at or task.returned_at <= since)


def _takes(node: Node) -> bool:
    return node.state == "healthy" and not node.leaving and node.active == "rollout"


# ---------------------------------------------------------------- how many tasks

PROBE_AFTER = 8  # failures in a row, while others succeed, after which a node gets one task at a time
_FEWEST_ENDS = 3.0  # endings before a node's failures say anything
SLOW = 1.5  # times slower than the others' median at which a node counts as slow
_FADING = 8.0  # of its episodes' seconds in which the record of a node that idles fades to a third


@dataclass(frozen=True)
class NodeLook:
    """What is known of a node. `ends` and `bad_ends` are decayed counts, `pace` the seconds of an episode, `speed` the
    samples that it makes in a second for every task that it plays, `idle` the seconds in which it has held none."""

    capacity: int
    ends: float = 0.0
    bad_ends: float = 0.0
    bad_row: int = 0
    pace: float | None = None
    speed: float | None = None
    held: int = 0
    idle: float = 0.0

    @property
    def failing(self) -> float:
        return self.bad_ends / self.ends if self.ends >= _FEWEST_ENDS else 0.0


@dataclass(frozen=True)
class Work:
    """What there is to do: tasks that wait, in groups of `group`. `ends`: nothing more comes before all are done."""

    pending: int
    group: int = 1
    ends: bool = False


@dataclass(frozen=True)
class Allowance:
    """Most tasks that a node may hold at once, and why that is less than its capacity."""

    tasks: int
    why: str = ""


def allowance(node: NodeLook, others: Sequence[NodeLook], work: Work, *, behind: int = 0, bound: int = 0) -> Allowance:
    """`others` are those that could have the tasks instead; `behind` versions of at most `bound` is how old the node's
    weights are."""
    if node.bad_row >= PROBE_AFTER and any(other.bad_row == 0 and other.ends > 0 for other in others):
        return Allowance(1, f"its last {node.bad_row} episodes failed while others' succeed: one at a time")
    trusted, fresh = _reliable(node, others), _fresh(behind, bound)
    tasks = max(1, int(node.capacity * trusted * fresh + 1e-9))
    most = _worthwhile(node, others, work)
    parts = {
        "it fails more often than the others": trusted < 1,
        "it is slower than the others": most is not None and most < tasks,
        "its weights are behind": fresh < 1,
    }
    tasks = tasks if most is None else min(tasks, most)
    why = " and ".join(reason for reason, holds in parts.items() if holds)
    return Allowance(tasks, f"{why}: {tasks} of {node.capacity} tasks" if tasks < node.capacity else "")


def _reliable(node: NodeLook, others: Sequence[NodeLook]) -> float:
    told = [other.failing for other in others if other.ends >= _FEWEST_ENDS]
    return 1.0 - max(0.0, node.failing - median(told)) if told else 1.0


def _fresh(behind: int, bound: int) -> float:
    return 1.0 - min(max(behind, 0), bound) / (bound + 1)


# ---------------------------------------------------------------- speed


def is_slow(node: NodeLook, others: Sequence[NodeLook]) -> bool:
    """Return whether the amount of work matters for the node's allowance."""
    return _seen_slow(node, others) is not None


def _seen_slow(node: NodeLook, others: Sequence[NodeLook]) -> tuple[NodeLook, float] | None:
    """The node, its record faded, and the others' usual speed; None for one that is not slow, or not known to be."""
    quick = [other for other in others if other.pace and other.speed]
    if not node.pace or not node.speed or not quick:
        return None
    usual = median([other.speed or 0.0 for other in quick])
    node = _faded(node, median([other.pace or 0.0 for other in quick]), usual)
    return (node, usual) if (node.speed or 0.0) * SLOW < usual else None


def _worthwhile(node: NodeLook, others: Sequence[NodeLook], work: Work) -> int | None:
    """Most tasks that a slow node should hold."""
    seen = _seen_slow(node, others)
    if seen is None:
        return None
    return _in_time(seen[0], others, work) if work.ends else _share(seen[0], others, work, seen[1])


def _faded(node: NodeLook, pace: float, speed: float) -> NodeLook:
    """The record of an idle node fades."""
    if node.held or not node.pace or not node.speed:
        return node
    kept = math.exp(-max(node.idle, 0.0) / (_FADING * node.pace))
    return replace(node, pace=pace + (node.pace - pace) * kept, speed=speed + (node.speed - speed) * kept)


def _share(node: NodeLook, others: Sequence[NodeLook], work: Work, usual: float) -> int:
    """By samples a second when all are full; a node that has made none yet counts as a usual one."""
    all_of_it = work.pending + node.held + sum(other.held for other in others)
    own = node.capacity * (node.speed or usual)
    theirs = sum(other.capacity * (other.speed or usual) for other in others)
    left_over = all_of_it - sum(other.capacity for other in others)
    share = int(all_of_it * own / (own + theirs) + 1e-9)
    return max(left_over, share - share % work.group)


def _in_time(node: NodeLook, others: Sequence[NodeLook], work: Work) -> int:
    """What it holds, and as many more as the others would not have finished when it has.

    The last of n tasks that wait for the others begins once those before it have, which end at their joint rate, and
    then takes an episode's time.
    """
    quick = [other for other in others if other.pace and other.speed]
    rate = sum(other.capacity / (other.pace or math.inf) for other in quick)
    pace = sum(other.capacity for other in quick) / rate
    free = sum(max(0, other.capacity - other.held) for other in quick)
    # A hair is given away: rounding must not keep the last task from who is exactly as quick.
    return node.held + max(0, math.floor(work.pending - free - rate * ((node.pace or 0.0) - pace) + 1e-9))

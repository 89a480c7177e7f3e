"""Which tasks a node gets: those whose tokens can still be trained when they come back.

A node that is too far behind in any policy, or on a version that died, gets none, nor does one that leaves. Tasks of
one group go to the node that plays the group already, for its prefix cache, as long as it keeps up; nobody idles while
others' tasks wait, unless it is so slow that they get them done sooner (`throttle`).
Evaluations take at most half of what a node holds while training tasks are pending; runs that wait for them anyway
(on-policy, finishing) play them first. Writes no table: `tasks` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from rillflow.dataflow.ledger.throttle import PROBE_AFTER, SLOW, Allowance, NodeLook, Work, allowance, is_slow
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.types import Task, TaskLease

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

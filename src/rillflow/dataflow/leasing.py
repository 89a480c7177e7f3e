"""Which tasks a node gets: those whose tokens can still be trained when they come back.

A node that is too far behind in any policy, or on a version that died, gets none, nor does one that leaves. Tasks of
one group go to the node that plays the group already, for its prefix cache, as long as it keeps up; nobody idles while
others' tasks wait, unless it is so slow that they get them done sooner (`throttle`).
Evaluations take at most half of what a node holds while training tasks are pending; runs that wait for them anyway
(on-policy, finishing) play them first.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence

from rillflow.dataflow.groups import Groups
from rillflow.dataflow.lineage import Lineage
from rillflow.dataflow.nodes import Nodes
from rillflow.dataflow.part import Base, Part
from rillflow.dataflow.streams import Streams
from rillflow.dataflow.throttle import Allowance, Work
from rillflow.types import Task, TaskLease

_LEASABLE = (
    "SELECT t.*, g.prompt FROM tasks t JOIN groups g ON g.id = t.grp "
    "WHERE t.state = 'pending' AND ifnull(t.last_node = ? AND t.returned_at > ?, 0) = 0"
)
Versions = Mapping[str, int]


class Leasing(Part):
    def __init__(self, base: Base, groups: Groups, lineage: Lineage, nodes: Nodes, streams: Streams) -> None:
        super().__init__(base)
        self._groups = groups
        self._lineage = lineage
        self._nodes = nodes
        self._streams = streams

    def repeat(self, node: str, ask: str) -> list[TaskLease]:
        """Return the leases that the request `ask` gave to the node and that it still holds, with their full time."""
        rows = self._db.all(
            "SELECT t.*, g.prompt FROM tasks t JOIN groups g ON g.id = t.grp "
            "WHERE t.state = 'leased' AND t.ask = ? AND t.node = ? ORDER BY t.lane, t.ord, t.place",
            (ask, node),
        )
        deadline = self._clock.now() + self._rules.task_lease
        self._db.many("UPDATE tasks SET deadline = ? WHERE id = ?", [(deadline, row["id"]) for row in rows])
        return [TaskLease(task=self._task(row), attempt=row["attempt"], seconds=self._rules.task_lease) for row in rows]

    def lease(self, node: str, versions: Versions, want: int, *, ask: str, training: bool) -> list[TaskLease]:
        """Lease up to `want` tasks that a node on these versions may play; `ask` is the request's attempt id."""
        if self._unfit(versions) or self._nodes.is_leaving(node):
            return []
        held, held_eval = self._nodes.held(node)
        allowed = self.allowance(node, versions, want, training=training)
        want = min(want, max(0, allowed.tasks - held)) if allowed.why else want
        half = training and not self._rules.on_policy
        room = min(want, max(0, (held + want + 1) // 2 - held_eval)) if half else want
        leases = self._lease_rows(self._pending_eval(node, versions, room), node, ask)
        if len(leases) < want and self._too_old(versions) is None:
            leases += self._lease_rows(self._pending_train(node, versions, want - len(leases)), node, ask)
        if half and len(leases) < want:
            leases += self._lease_rows(self._pending_eval(node, versions, want - len(leases)), node, ask)
        return leases

    def allowance(self, node: str, versions: Versions, want: int, *, training: bool) -> Allowance:
        """How many tasks the node may hold, by how old its oldest weights are and how it has done so far."""
        heads = self._lineage.heads

        def work() -> Work:
            pending = self._db.value("SELECT count(*) FROM tasks WHERE state = 'pending'")
            return Work(int(pending), self._rules.group_size, ends=self._rules.on_policy or not training)

        ages = [(max(0, heads[p] - versions[p]), b) for p in heads if (b := self._bound(p)) is not None]
        behind, bound = max(ages, key=lambda age: age[0] / (age[1] + 1), default=(0, 0))
        return self._nodes.allowance(node, want, work, behind, bound)

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

    def why_none(self, node: str, versions: Versions, pending: int, *, training: bool) -> str:
        """What a node that gets no task waits for."""
        if self._nodes.is_leaving(node):
            return "the end of its episodes: it leaves"
        if policy := self._unfit(versions):
            return f"weights: it serves no live version of {policy}"
        if old := self._too_old(versions):
            return f"weights: {old}"
        if pending and (held := self.allowance(node, versions, 1, training=training)).why:
            return f"its episodes: {held.why}"
        if pending:
            return "weights: the pending tasks need a newer version, or another node"
        return self._streams.fullness()

    # ------------------------------------------------------------ pending tasks

    def _pending_eval(self, node: str, versions: Versions, want: int) -> list[sqlite3.Row]:
        rounds = [
            row["id"]
            for row in self._db.all("SELECT id, versions FROM rounds WHERE state = 'running'")
            if all(versions.get(policy, -1) >= version for policy, version in json.loads(row["versions"]).items())
        ]
        if want < 1 or not rounds:
            return []
        marks = ",".join("?" * len(rounds))
        return self._db.all(
            f"{_LEASABLE} AND t.lane = 'eval' AND t.round IN ({marks}) ORDER BY t.round, t.ord, t.place LIMIT ?",
            (*self._left_to_others(node), *rounds, want),
        )

    def _pending_train(self, node: str, versions: Versions, want: int) -> list[sqlite3.Row]:
        end = self._streams.window_end(versions)
        if self._rules.on_policy or self._nodes.taking < 2:
            return self._train_rows(node, "t.round = 0", (), end, want)
        rows = self._train_rows(node, "t.home = ?", (node,), end, want)
        if len(rows) < want:
            rows += self._train_rows(node, "t.home IS NULL", (), end, want - len(rows))
        if len(rows) < want:  # rather another's group than nothing
            # The plus keeps SQLite from an index that has them in another order: it would sort them all.
            rows += self._train_rows(node, "t.round = 0 AND +t.home != ?", (node,), end, want - len(rows))
        return rows

    def _train_rows(self, node: str, where: str, values: tuple[str, ...], end: int, want: int) -> list[sqlite3.Row]:
        return self._db.all(
            f"{_LEASABLE} AND t.lane = 'train' AND {where} AND t.ord <= ? ORDER BY t.ord, t.place LIMIT ?",
            (*self._left_to_others(node), *values, end, want),
        )

    def _left_to_others(self, node: str) -> tuple[str, float]:
        """A task that went wrong on this node is left to another for a while, when there is one."""
        return node if self._nodes.taking > 1 else "", self._clock.now() - self._rules.node_timeout

    # ------------------------------------------------------------ leasing

    def _lease_rows(self, rows: Sequence[sqlite3.Row], node: str, ask: str) -> list[TaskLease]:
        if not rows:
            return []
        now, seconds = self._clock.now(), self._rules.task_lease
        attempts = [f"{row['id']}-{row['leases'] + 1}" for row in rows]  # part of URLs: nothing that needs quoting
        self._db.many(
            "UPDATE tasks SET state = 'leased', attempt = ?, node = ?, home = ifnull(home, ?), deadline = ?, ask = ?, "
            "leases = leases + 1 WHERE id = ?",
            [(attempt, node, node, now + seconds, ask, row["id"]) for attempt, row in zip(attempts, rows, strict=True)],
        )
        self._db.many(
            "INSERT INTO attempts (id, task, node, leased_at) VALUES (?, ?, ?, ?)",
            [(attempt, row["id"], node, now) for attempt, row in zip(attempts, rows, strict=True)],
        )
        self._settle_in({row["grp"]: row["home"] for row in rows}, node)
        evaluations = sum(row["lane"] == "eval" for row in rows)
        self._nodes.leased(node, len(rows) - evaluations, evaluations)
        return [
            TaskLease(task=self._task(row), attempt=attempt, seconds=seconds)
            for attempt, row in zip(attempts, rows, strict=True)
        ]

    def _settle_in(self, homes: Mapping[str, str | None], node: str) -> None:
        """These groups are being played; those that nobody played before have their home here."""
        now = self._clock.now()
        for group, home in homes.items():
            self._db.run("UPDATE groups SET started = ? WHERE id = ? AND started IS NULL", (now, group))
            if home is None:
                self._db.run("UPDATE tasks SET home = ? WHERE grp = ? AND state = 'pending'", (node, group))

    def _task(self, row: sqlite3.Row) -> Task:
        prompt = self._groups.prompt(row["lane"], row["ord"], row["prompt"])
        return Task(
            id=row["id"], prompt=prompt, group=row["grp"], place=row["place"], lane=row["lane"], seed=row["seed"]
        )

"""The groups that are playing and their tasks, kept in memory beside their rows.

`tasks` changes both in the same transition. A restart reads the groups from the tables. A rollback makes it read those
again that changed since the last write. The deadlines of leases are kept in memory only: a restart gives every lease
its full time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator

import msgspec

from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.states import MACHINES
from rillflow.dataflow.ledger.tables import NEWEST, TASK, Task
from rillflow.types import Lane

ANYWHERE = ""  # any home; no node has an empty name
_OPEN = MACHINES["tasks"].open
_LANES: tuple[Lane, Lane] = ("train", "eval")
_TASKS = f"SELECT {TASK} FROM tasks t JOIN groups g ON g.id = t.grp WHERE t.grp = ? ORDER BY t.place"
Key = tuple[int, int, str]  # the round, the order and the id of a group


class PlayingGroup(msgspec.Struct, gc=False):
    """A group with all its tasks, in the order of their places. `open` counts those that are pending or leased.

    `versions` are the oldest and the newest version of its trained tokens, by the policy that sampled them; groups of
    evaluations have none. `waiting` counts the pending tasks by their home.
    """

    id: str
    lane: Lane
    round: int
    ord: int
    prompt: str
    tasks: list[Task] = []
    versions: dict[str, tuple[int, int]] = {}
    waiting: dict[str | None, int] = {}
    shared: bool = False  # it was complete once, and may have shares
    open: int = 0

    @property
    def key(self) -> Key:
        return self.round, self.ord, self.id


class Playing(Part):
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self._wanted = {name for name in self._rules.policies if self._rules.streams_of(name)}
        self._groups: dict[str, PlayingGroup] = {}
        self._order: dict[Lane, list[Key]] = {lane: [] for lane in _LANES}  # groups with pending tasks
        self._homes: dict[tuple[Lane, str | None], list[Key]] = {}  # the same, by the home of such a task
        self._held: dict[str, Task] = {}  # leased tasks by their attempt
        self._nodes: dict[str, dict[str, Task]] = {}  # the same, by their node
        self._pending = 0
        self._touched: set[str] = set()  # groups that changed since the last write
        self._writes = -1
        self._rollbacks = -1

    # ------------------------------------------------------------ reading

    def _refresh(self) -> None:
        """Read the groups again that a rollback may have changed; all of them at first."""
        if self._rollbacks == self._db.rollbacks:
            return
        first, self._rollbacks = self._rollbacks < 0, self._db.rollbacks
        for group in self._ids() if first else list(self._touched):
            self.reload(group)

    def _ids(self) -> list[str]:
        query = "SELECT id FROM groups WHERE lane = ? AND state = 'playing' ORDER BY round, ord"
        return [group for lane in _LANES for group in self._db.column(query, (lane,))]

    def reload(self, group: str) -> None:
        """Read a group from the tables; it is forgotten unless it is playing."""
        deadlines = {task.attempt: task.deadline for task in self.remove(group)}
        query = "SELECT id, lane, round, ord, prompt FROM groups WHERE id = ? AND state = 'playing'"
        row = self._db.one(query, (group,))
        if row is None:
            return
        tasks = [Task(*values) for values in self._db.all(_TASKS, (group,))]
        for task in tasks:
            task.deadline = deadlines.get(task.attempt, self._clock.now() + self._rules.task_lease)
        name, lane, number, order, prompt = row
        versions = self._versions(group) if lane == "train" else {}
        shared = bool(self._db.value("SELECT EXISTS (SELECT 1 FROM shares WHERE grp = ?)", (group,)))
        self.add(PlayingGroup(name, lane, number, order, prompt, tasks, versions, shared=shared))

    def _versions(self, group: str) -> dict[str, tuple[int, int]]:
        """Return the versions of a group's tokens. Rows that were released once are trained no more; those of a policy
        that no stream trains on were never kept."""
        found: dict[str, tuple[int, int]] = {}
        for policy, live, oldest, newest in self._db.all(
            "SELECT policy, live, min(oldest), max(newest) FROM samples WHERE grp = ? AND trained > 0 "
            "GROUP BY policy, live",
            (group,),
        ):
            if live or policy not in self._wanted:
                low, high = found.get(policy, (oldest, newest))
                found[policy] = (min(low, oldest), max(high, newest))
        return found

    # ------------------------------------------------------------ looking

    def get(self, group: str) -> PlayingGroup:
        self._refresh()
        return self._groups[group]

    def sampled(self, producer: str, low: int, high: int) -> list[PlayingGroup]:
        """Return the groups of training in which `producer` may have trained tokens of versions v with
        low < v <= high, in the order of their admission."""
        self._refresh()
        found = []
        for group in self._groups.values():
            oldest, newest = group.versions.get(producer, (NEWEST, -1))
            if newest > low and oldest <= high:
                found.append(group)
        return sorted(found, key=lambda group: group.ord)

    def held(self, attempt: str) -> Task | None:
        """Return the task that this attempt holds."""
        self._refresh()
        return self._held.get(attempt)

    def leased(self, node: str | None = None) -> Collection[Task]:
        """Return the tasks that the node, or any node, holds."""
        self._refresh()
        return self._held.values() if node is None else self._nodes.get(node, {}).values()

    @property
    def number_pending(self) -> int:
        self._refresh()
        return self._pending

    def pending(
        self, lane: Lane, home: str | None = ANYWHERE, *, until: int = NEWEST, rounds: Collection[int] | None = None
    ) -> Iterator[Task]:
        """Yield the pending tasks with this home, in the order of the rounds, the groups and their places: up to the
        group at position `until`, and of these rounds if they are given."""
        self._refresh()
        for number, order, name in self._order[lane] if home == ANYWHERE else self._homes.get((lane, home), ()):
            if order > until:
                return
            if rounds is not None and number not in rounds:
                continue
            for task in self._groups[name].tasks:
                if task.state == "pending" and home in (ANYWHERE, task.home):
                    yield task

    # ------------------------------------------------------------ changing

    def add(self, group: PlayingGroup) -> None:
        """Take a group in, with its tasks as they are."""
        self._touch(group.id)
        self._groups[group.id] = group
        for task in group.tasks:
            self._enter(group, task)

    def remove(self, group: str) -> list[Task]:
        """Forget a group; returns its tasks."""
        self._touch(group)
        found = self._groups.pop(group, None)
        for task in found.tasks if found else ():
            assert found is not None
            self._leave(found, task)
        return found.tasks if found else []

    def move(self, task: Task, state: str, attempt: str | None = None, node: str | None = None) -> None:
        """Put a task into another state; one that is leased or done has an attempt and a node."""
        self._touch(task.grp)
        group = self._groups[task.grp]
        self._leave(group, task)
        task.state, task.attempt, task.node = state, attempt, node
        self._enter(group, task)

    def set_home(self, tasks: Iterable[Task], home: str | None) -> None:
        """Let pending tasks be played where their group is played."""
        for task in tasks:
            self._touch(task.grp)
            group = self._groups[task.grp]
            self._leave(group, task)
            task.home = home
            self._enter(group, task)

    def note_versions(self, group: str, policy: str, oldest: int, newest: int) -> None:
        """Count the versions of a sample's trained tokens in."""
        self._touch(group)
        versions = self._groups[group].versions
        low, high = versions.get(policy, (oldest, newest))
        versions[policy] = (min(low, oldest), max(high, newest))

    def _touch(self, group: str) -> None:
        self._refresh()
        if self._writes != self._db.writes:
            self._touched.clear()
            self._writes = self._db.writes
        self._touched.add(group)

    def _enter(self, group: PlayingGroup, task: Task) -> None:
        """Index a task by the state that it is in."""
        if task.state not in _OPEN:
            return
        group.open += 1
        if task.state == "leased":
            assert task.attempt is not None, task
            assert task.node is not None, task
            self._held[task.attempt] = task
            self._nodes.setdefault(task.node, {})[task.attempt] = task
            return
        self._pending += 1
        if not group.waiting:
            insort(self._order[group.lane], group.key)
        if task.home not in group.waiting:
            insort(self._homes.setdefault((group.lane, task.home), []), group.key)
        group.waiting[task.home] = group.waiting.get(task.home, 0) + 1

    def _leave(self, group: PlayingGroup, task: Task) -> None:
        """Take a task out of the index of its state."""
        if task.state not in _OPEN:
            return
        group.open -= 1
        if task.state == "leased":
            assert task.attempt is not None, task
            assert task.node is not None, task
            del self._held[task.attempt]
            del self._nodes[task.node][task.attempt]
            if not self._nodes[task.node]:
                del self._nodes[task.node]
            return
        self._pending -= 1
        group.waiting[task.home] -= 1
        if not group.waiting[task.home]:
            del group.waiting[task.home]
            _discard(self._homes[group.lane, task.home], group.key)
            if not self._homes[group.lane, task.home]:
                del self._homes[group.lane, task.home]
        if not group.waiting:
            _discard(self._order[group.lane], group.key)


def _discard(keys: list[Key], key: Key) -> None:
    del keys[bisect_left(keys, key)]

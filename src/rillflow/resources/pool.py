"""The abstract pool: workers are asked for by what they can do, never by name.

Every worker has capability tags and at most one active tag. A request takes idle workers first and then, if allowed,
preempts others. Pure bookkeeping: nothing here starts, stops or waits.

Invariants: a worker is never active in a tag that it does not carry, and never in two; an ask gives at most as many as
were asked for; after `release` every worker that can roll out and does not train rolls out; a worker that has left is
in no assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rillflow.config.resources import Tag
from rillflow.resources.workers import Worker


class Asked(NamedTuple):
    """The assigned workers, the best suited first; `preempted` are those that had another active tag."""

    assigned: tuple[str, ...]
    preempted: tuple[str, ...]


class Pool:
    """Workers in the order in which they joined."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self._workers: dict[str, Worker] = {}
        self._active: dict[str, Tag] = {}
        for worker in workers:
            self.join(worker)

    def join(self, worker: Worker) -> None:
        """Add a worker; it is idle until it is requested."""
        if worker.name in self._workers:
            raise ValueError(f"{worker.name} is in the pool already")
        self._workers[worker.name] = worker

    def leave(self, name: str) -> Tag | None:
        """Remove a worker that has left or died; returns its active tag."""
        del self._workers[name]
        return self._active.pop(name, None)

    def ask(
        self, tag: Tag, count: int, *, policy: str | None = None, preempt: bool = True, prefer: Sequence[str] = ()
    ) -> Asked:
        """Assign up to `count` more workers to `tag`, idle ones first. Training prefers the highest train priority,
        rollout the lowest; with `policy`, only workers that train it. Those named in `prefer` come before all others of
        their kind (idle or not), in that order."""
        able = [
            worker
            for worker in self._workers.values()
            if tag in worker.tags and self._active.get(worker.name) != tag and policy in (None, worker.policy)
        ]
        ranked = sorted(able, key=lambda worker: self._rank(worker, tag, prefer))
        given = [worker.name for worker in ranked if preempt or worker.name not in self._active][:count]
        preempted = tuple(name for name in given if name in self._active)
        self._active |= dict.fromkeys(given, tag)
        return Asked(tuple(given), preempted)

    def _rank(self, worker: Worker, tag: Tag, prefer: Sequence[str]) -> tuple[bool, int, float, int]:
        """Return the sort key, the best first. Among equals, workers with fewer tags come first: the others stay
        free."""
        wanted = prefer.index(worker.name) if worker.name in prefer else len(prefer)
        priority = worker.priority or 0.0
        return worker.name in self._active, wanted, -priority if tag == "train" else priority, len(worker.tags)

    def release(self, names: Iterable[str]) -> tuple[str, ...]:
        """Release workers that have finished. Every worker that can roll out and does not train rolls out: returns
        them."""
        for name in names:
            self._active.pop(name, None)
        return self.ask("rollout", len(self._workers), preempt=False).assigned

    def active(self, name: str) -> Tag | None:
        """Return a worker's active tag; None while it is idle."""
        return self._active.get(name)

    def doing(self, tag: Tag | None) -> tuple[str, ...]:
        """Return the workers whose active tag is `tag` (None: idle), in the order in which they joined."""
        return tuple(name for name in self._workers if self._active.get(name) == tag)

    def __contains__(self, name: object) -> bool:
        return name in self._workers

    def __len__(self) -> int:
        return len(self._workers)

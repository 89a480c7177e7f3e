"""From a recipe and its workers to the processes of a run, and from one such plan to the next.

The pool gives workers to those who ask for what they can do, never by name. Every worker has capability tags and at
most one active tag. A request takes idle workers first and then, if allowed, preempts others. `plan` decides,
`difference` lists the changes, and `runtime.reconcile` carries them out. Colocated, disaggregated and multiplexed runs
are the same code here: only the workers' tags differ. Nothing here starts, stops or waits.

Invariants: a worker is never active in a tag that it does not carry, and never in two; an ask gives at most as many as
were asked for; after `release` every worker that can roll out and does not train rolls out; a worker that has left is
in no assignment. Every policy has exactly one trainer, with a rank for each worker given to it; a worker is in one
process at most; one that trains and can roll out hosts a node, and plays while it waits; every other one that can roll
out is a node of its own; a change of tags moves no worker that it does not concern.

A change of tags is refused if the run could never progress after it. A worker without tags is idle. Set the tags of a
lost worker, even to the same ones, to try it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rillflow.config import Recipe
from rillflow.config.runs import Tag
from rillflow.errors import ConfigError, RunError
from rillflow.resources.workers import TAGS, Worker, find
from rillflow.types.runs import process_of


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


# ---------------------------------------------------------------- the plan of a run's processes


Role = Literal["dataflow", "unit", "weights", "engine", "stage", "rollout", "trainer", "maintain"]


@dataclass(frozen=True)
class Placed:
    """One process: `rillflow ROLE RUN OPTIONS`. `workers` are those it takes, of a trainer in the order of its ranks;
    `playing` are the ranks that host a node."""

    name: str
    role: Role
    options: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    policy: str = ""
    playing: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of a trainer; 0 for another role."""
        return len(self.workers) if self.role == "trainer" else 0

    def arguments(self, root: Path) -> tuple[str, ...]:
        return (self.role, str(root), *self.options)


@dataclass(frozen=True)
class Plan:
    """The assignment of a run's workers to processes. `spares` do nothing."""

    nodes: tuple[Placed, ...]
    trainers: tuple[Placed, ...]
    spares: tuple[str, ...] = ()

    @property
    def processes(self) -> dict[str, Placed]:
        """By name, trainers first: nodes start while a trainer publishes the weights that they wait for."""
        return {process.name: process for process in (*self.trainers, *self.nodes)}

    @property
    def of_worker(self) -> dict[str, tuple[str, int | None]]:
        """The process of each worker that has one, and its rank if that is a trainer."""
        ranks = {
            worker: (trainer.name, rank) for trainer in self.trainers for rank, worker in enumerate(trainer.workers)
        }
        return ranks | {worker: (node.name, None) for node in self.nodes for worker in node.workers}


class Difference(NamedTuple):
    """The changes: processes to start, processes to stop, and trainers that get new workers."""

    start: list[Placed]
    retire: list[Placed]
    restart: list[tuple[Placed, Placed]]


def ledgers(recipe: Recipe) -> list[Placed]:
    """The dataflow services of a run, one for each ledger, the first one's first."""
    numbers = range(recipe.dataflow.ledgers)
    return [Placed(process_of(n), "dataflow", ("--ledger", str(n)) if n else ()) for n in numbers]


def units(recipe: Recipe) -> list[Placed]:
    """The storage units of all ledgers."""
    indices = range(recipe.dataflow.units.count)
    first = [Placed(name, "unit", ("--name", name)) for name in (f"unit-{index}" for index in indices)]
    return first + [
        Placed(name, "unit", ("--name", name, "--ledger", str(ledger)))
        for ledger in range(1, recipe.dataflow.ledgers)
        for name in (f"unit-{ledger}-{index}" for index in indices)
    ]


def services(recipe: Recipe) -> list[Placed]:
    """Return the processes beside the dataflow services and the workers; they stay until those have ended."""
    engines = [f"engine-{index}" for index in range(recipe.rollout.engines)]
    return [
        *units(recipe),
        *([Placed("weights", "weights")] if recipe.runtime.weights_server else []),
        *(Placed(name, "engine", ("--name", name)) for name in engines),
        *stages(recipe),
    ]


def stages(recipe: Recipe) -> list[Placed]:
    """The workers of the policies' stages."""
    return [
        Placed(process, "stage", (name, "--policy", policy, "--name", process), policy=policy)
        for policy, settings in recipe.policies.items()
        for name, stage in settings.stages.items()
        for process in (f"stage-{policy}-{name}-{index}" for index in range(stage.workers))
    ]


def maintainers(recipe: Recipe) -> list[Placed]:
    """Return the maintainer's process, if the recipe wants one."""
    return [Placed("maintainer", "maintain")] if recipe.resources.scaling.enabled else []


def node_of(worker: str) -> str:
    """Return the name of a node on a worker; never a trainer's name, whose files it would share."""
    return worker if worker.startswith("rollout") else f"rollout-{worker}"


def hosted_node(rank: int) -> str:
    """The name of the node that a rank of a trainer hosts."""
    return f"colocated-{rank}"


def plan(recipe: Recipe, workers: Sequence[Worker], current: Plan | None = None) -> Plan:
    """Return which process each worker runs. Workers that train in `current` keep training if possible.

    Raises RunError if the run could never progress: no worker to train a policy, or none to roll out.
    """
    by_name = {worker.name: worker for worker in workers if not worker.lost}
    pool = Pool(by_name.values())
    before = {trainer.policy: trainer.workers for trainer in current.trainers} if current else {}
    trainers = []
    for policy, settings in recipe.policies.items():
        given = pool.ask("train", settings.trainer.ranks, policy=policy, prefer=before.get(policy, ())).assigned
        if not given:
            raise RunError(
                f"no worker can train {policy}", "give one the tag: `rillflow tags RUN WORKER +train`, or in the recipe"
            )
        trainers.append(_trainer(recipe, policy, [by_name[name] for name in given]))
    pool.release(())
    nodes = [Placed(node_of(name), "rollout", ("--name", node_of(name)), (name,)) for name in pool.doing("rollout")]
    _check(recipe, trainers, nodes)
    return Plan(tuple(nodes), tuple(trainers), pool.doing(None))


def _trainer(recipe: Recipe, policy: str, workers: Sequence[Worker]) -> Placed:
    """Return a trainer's process. Its arguments hold only what the recipe does not say."""
    every, wanted = tuple(range(len(workers))), recipe.policies[policy].trainer.ranks
    playing = tuple(rank for rank in every if "rollout" in workers[rank].tags)
    options = ["--policy", policy]
    if len(workers) != wanted:
        options += ["--ranks", str(len(workers))]
    if playing != (() if recipe.mode == "asynchronous" else every):
        options += ["--playing", ",".join(map(str, playing))]
    names = tuple(worker.name for worker in workers)
    return Placed(f"trainer-{policy}", "trainer", tuple(options), names, policy, playing)


def _check(recipe: Recipe, trainers: Sequence[Placed], nodes: Sequence[Placed]) -> None:
    playing = any(trainer.playing for trainer in trainers)
    if not nodes and not playing:
        raise RunError("no worker rolls out", "give one the tag: `rillflow tags RUN WORKER +rollout`, or in the recipe")
    if playing and (len(recipe.policies) > 1 or recipe.outside):
        raise RunError(
            "a worker that trains can roll out as well only in a run of one policy, with workflow or command",
            "take one of the two tags from it",
        )


def planned(recipe: Recipe, workers: Sequence[Worker]) -> Plan | None:
    """Return the present plan of a run, as recorded beside its workers; None before it began.

    It names only the workers that train, in the order of ranks: the next plan keeps these.
    """
    trainers = []
    for policy in recipe.policies:
        ranks = {
            worker.rank: worker.name
            for worker in workers
            if worker.rank is not None and worker.process == f"trainer-{policy}"
        }
        if ranks:
            names = tuple(ranks[rank] for rank in sorted(ranks))
            trainers.append(Placed(f"trainer-{policy}", "trainer", workers=names, policy=policy))
    return Plan((), tuple(trainers)) if trainers else None


def difference(running: Mapping[str, Placed], wanted: Plan) -> Difference:
    """Return the changes from the running processes to the plan."""
    processes = wanted.processes
    return Difference(
        start=[process for name, process in processes.items() if name not in running],
        retire=[process for name, process in running.items() if name not in processes],
        restart=[(old, processes[name]) for name, old in running.items() if processes.get(name, old) != old],
    )


# ---------------------------------------------------------------- changing tags while the run goes on


NONE = "none"


def parse_tags(words: Sequence[str], now: Collection[Tag]) -> frozenset[Tag]:
    """Parse tags: `rollout,train` or `none` replace the tags, `+train -rollout` change those of `now`."""
    names = [name for word in words for name in word.replace(",", " ").split()]
    signed = [name for name in names if name[0] in "+-"]
    if not names or (signed and len(signed) < len(names)) or (NONE in names and len(names) > 1):
        raise ConfigError(
            f"{' '.join(names)!r} is not a list of tags", "say `rollout,train`, `none`, or `+train -rollout`"
        )
    tags: set[Tag] = set(now) if signed else set()
    for name in names:
        if name.startswith("-"):
            tags.discard(_tag(name[1:]))
        elif name != NONE:
            tags.add(_tag(name.removeprefix("+")))
    return frozenset(tags)


def _tag(name: str) -> Tag:
    for tag in TAGS:
        if name == tag:
            return tag
    raise ConfigError(f"unknown tag {name!r}", f"one of: {', '.join(TAGS)}")


def retagged(recipe: Recipe, workers: Sequence[Worker], name: str, words: Sequence[str]) -> list[Worker]:
    """Return the workers after the change of one; raises RunError if the run could not continue with them."""
    old = find(workers, name)
    new = msgspec.structs.replace(old, tags=parse_tags(words, old.tags), lost=False)
    changed = [new if worker is old else worker for worker in workers]
    try:
        plan(recipe, changed, planned(recipe, workers))
    except RunError as error:
        tags = ",".join(sorted(new.tags)) or NONE
        raise RunError(f"{name} cannot have the tags {tags}: {error.message}", error.hint) from None
    return changed

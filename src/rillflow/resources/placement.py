"""From a recipe and its workers to the processes of a run, and from one such plan to the next.

Pure: `plan` decides, `difference` lists the changes, and `runtime.reconcile` carries them out. Colocated, disaggregated
and multiplexed runs are the same code here: only the workers' tags differ.

Invariants: every policy has exactly one trainer, with a rank for each worker given to it; a worker is in one process
at most; one that trains and can roll out hosts a node, and plays while it waits; every other one that can roll out is
a node of its own; a change of tags moves no worker that it does not concern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rillflow.config import Recipe
from rillflow.errors import RunError
from rillflow.resources.pool import Pool
from rillflow.resources.workers import Worker
from rillflow.types.ledgers import process_of

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

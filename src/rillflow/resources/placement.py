"""From a recipe and its workers to the processes of a run, and from one such plan to the next.

Pure: `plan` decides, `difference` says what is to be done, and who carries it out (`runtime.reconcile`) is another
matter. Colocated, disaggregated and multiplexed runs are the same code here: only the workers' tags differ.

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
        """How many processes train together; 0 where this is no trainer."""
        return len(self.workers) if self.role == "trainer" else 0

    def arguments(self, root: Path) -> tuple[str, ...]:
        return (self.role, str(root), *self.options)


@dataclass(frozen=True)
class Plan:
    """What the workers of a run are for. `spares` do nothing."""

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
    """What is to be done: start these, let those go, and give each of these trainers its new workers."""

    start: list[Placed]
    retire: list[Placed]
    restart: list[tuple[Placed, Placed]]


def services(recipe: Recipe) -> list[Placed]:
    """What a run needs beside its dataflow service and its workers; they stay until those have ended."""
    units = [f"unit-{index}" for index in range(recipe.dataflow.units.count)]
    engines = [f"engine-{index}" for index in range(recipe.rollout.engines)]
    return [
        *(Placed(name, "unit", ("--name", name)) for name in units),
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
    """The process that starts and retires nodes beyond those of the plan, where the recipe wants it."""
    return [Placed("maintainer", "maintain")] if recipe.resources.scaling.enabled else []


def node_of(worker: str) -> str:
    """The name of a node on a worker; never one of a trainer's, whose files it would share."""
    return worker if worker.startswith("rollout") else f"rollout-{worker}"


def hosted_node(rank: int) -> str:
    """The name of the node that a rank of a trainer hosts."""
    return f"colocated-{rank}"


def plan(recipe: Recipe, workers: Sequence[Worker], current: Plan | None = None) -> Plan:
    """Which process each worker runs. Those that train in `current` go on with it where they can.

    RunError where the run could never get on: nobody to train a policy, or nobody to roll out.
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
    """Its arguments say only what the recipe does not say by itself."""
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
    """The plan that a run carries out at present, by what it has written beside its workers; None before it began.

    Only who trains is told, in the order of ranks: that is what a plan to come keeps.
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
    """From what runs to what the plan wants."""
    processes = wanted.processes
    return Difference(
        start=[process for name, process in processes.items() if name not in running],
        retire=[process for name, process in running.items() if name not in processes],
        restart=[(old, processes[name]) for name, old in running.items() if processes.get(name, old) != old],
    )

"""What autoscaling saves: node-hours and wall time of a pool that the maintainer sizes, against fixed pools.

A simulated clock and real decisions: reports, rule, cooldown, starts, retirements and state are the code that a run
uses, unchanged; the pool and the trainer are a model (`bench.autoscaling_world`) whose demand changes over the run. The
setting is the published one: the trainer has 4 GPUs, pools have 6 to 11, a report comes every 10 versions. Published:
312.0 GPU-hours against 358.5 for 11 GPUs (23.9 h) and 359 for 6 (35.9 h), in 24.4 h: 13 % fewer at 2 % more time.

`by samples alone` is the published rule fed with counts alone: under capped admission nothing is produced that is not
taken, so such a pool grows and does not shrink; what the maintainer adds is that idle time counts as production.

    python -m bench.autoscaling [--quick] [--json FILE]

The cost of the simulation grows with steps x nodes (about a second of processor time for 1,200 steps), that of a
decision with the nodes.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from bench.autoscaling_world import World
from bench.common import Report, parser
from rillflow.config.runs import ScalingConfig
from rillflow.resources.maintainer.loop import Maintainer
from rillflow.resources.maintainer.pool import Book
from rillflow.types import NodeInfo
from rillflow.types.balance import Balance

SMALL, LARGE, TRAINER_GPUS = 6, 11, 4
PAPER_HOURS, PAPER_TIME = 358.5 / 312.0, 23.9 / 24.4  # of the large pool over ours: above 1 we are better


@dataclass(frozen=True)
class Outcome:
    """`gpu_hours` have the trainer's in them, as the published ones do."""

    hours: float
    node_hours: float
    wait: float
    changes: int

    @property
    def gpu_hours(self) -> float:
        return self.node_hours + TRAINER_GPUS * self.hours


class SimulatedRun:
    """The model, as a maintainer reaches a run. With `blind` it does not see what nodes hold."""

    def __init__(self, world: World, *, blind: bool) -> None:
        self._world, self._blind = world, blind

    async def ended(self) -> bool:
        return False

    async def balance(self) -> Balance:
        return self._world.balance()

    async def nodes(self) -> list[NodeInfo]:
        infos = self._world.infos()
        return [replace(info, capacity=0) for info in infos] if self._blind else infos

    async def retire(self, node: str, drain: float) -> None:
        self._world.retire(node, drain)


class SimulatedExecutor:
    def __init__(self, world: World) -> None:
        self._world = world
        self._stopped: set[str] = set()

    async def start(self, node: str) -> None:
        self._world.start(node)

    async def stop(self, node: str) -> None:
        self._world.stop(node)
        self._stopped.add(node)

    async def nodes(self) -> dict[str, bool]:
        return {n.name: n.gone is None for n in self._world.nodes.values() if n.name not in self._stopped}

    async def close(self) -> None: ...


class SimulatedClock:
    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def monotonic(self) -> float:
        return self._world.now


def fixed(size: int, steps: int, seed: int) -> Outcome:
    world = World(steps, seed)
    for number in range(size):
        world.start(f"node-{number}", boot=0.0)
    world.run(lambda: None)
    return outcome(world, 0)


def scaled(steps: int, seed: int, *, blind: bool = False) -> Outcome:
    world = World(steps, seed)
    for number in range(SMALL):
        world.start(f"auto-{number}", boot=0.0)
    scaling = ScalingConfig(least=SMALL, most=LARGE, cooldown=600.0, drain=600.0)
    with tempfile.TemporaryDirectory() as folder:
        maintainer = Maintainer(
            SimulatedRun(world, blind=blind),
            SimulatedExecutor(world),
            Book(Path(folder)),
            scaling,
            start_timeout=900.0,
            clock=SimulatedClock(world),
        )
        with asyncio.Runner() as runner:
            world.run(lambda: runner.run(maintainer.tick()) and None)
        lines = maintainer.lines(100_000)
    return outcome(world, sum(line.action in ("grow", "shrink") for line in lines))


def outcome(world: World, changes: int) -> Outcome:
    return Outcome(world.now / 3600, world.node_seconds() / 3600, world.wait_fraction(), changes)


def median(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        statistics.median(o.hours for o in outcomes),
        statistics.median(o.node_hours for o in outcomes),
        statistics.median(o.wait for o in outcomes),
        round(statistics.median(o.changes for o in outcomes)),
    )


def main() -> None:
    arguments = parser(__doc__).parse_args()
    steps, seeds = (400, 1) if arguments.quick else (1200, 3)
    pools = {
        f"fixed {SMALL}": lambda seed: fixed(SMALL, steps, seed),
        f"fixed {LARGE}": lambda seed: fixed(LARGE, steps, seed),
        "by samples alone": lambda seed: scaled(steps, seed, blind=True),
        "maintained": lambda seed: scaled(steps, seed),
    }
    found = {name: median([pool(seed) for seed in range(seeds)]) for name, pool in pools.items()}
    show(found, steps)
    ours, large, small = found["maintained"], found[f"fixed {LARGE}"], found[f"fixed {SMALL}"]
    report = Report("autoscaling")
    add = report.add
    add("GPU-hours against the large pool", ours.gpu_hours, large.gpu_hours, unit="h", goal=1.10, less_is_better=True)
    add("wall time against the large pool", ours.hours, large.hours, unit="h", goal=0.96, less_is_better=True)
    add("node-hours against the large pool", ours.node_hours, large.node_hours, unit="h", less_is_better=True)
    add("GPU-hours against the small pool", ours.gpu_hours, small.gpu_hours, unit="h", less_is_better=True)
    add("wall time against the small pool", ours.hours, small.hours, unit="h", less_is_better=True)
    report.finish(arguments.json)


def show(found: dict[str, Outcome], steps: int) -> None:
    table = Table("pool", title=f"{steps} steps, medians")
    for name in ("hours", "wait", "node-hours", "GPU-hours", "changes"):
        table.add_column(name, justify="right")
    for name, o in found.items():
        table.add_row(
            name, f"{o.hours:.1f}", f"{o.wait:.0%}", f"{o.node_hours:.1f}", f"{o.gpu_hours:.1f}", str(o.changes)
        )
    ours, large = found["maintained"], found[f"fixed {LARGE}"]
    console = Console(file=sys.stderr)
    console.print(table)
    console.print(
        f"GPU-hours of the large pool over ours {large.gpu_hours / ours.gpu_hours:.3f} (published "
        f"{PAPER_HOURS:.3f}); wall time {large.hours / ours.hours:.3f} (published {PAPER_TIME:.3f})",
        highlight=False,
    )


if __name__ == "__main__":
    main()

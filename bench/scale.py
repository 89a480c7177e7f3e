"""How Rillflow would do on 8 to 4,096 GPUs: a simulation fed with costs that are measured here.

    python -m bench.scale [--quick] [--costs FILE] [--models 8B,1.7B,32B] [--json FILE]
    python -m bench.scale --validate --costs FILE [--quick]

First what the ledger, the storage units, the gateway and the weight server take is measured at the real processes
(`scale_ledger`, `scale_parts`; `--costs` takes them from an earlier result instead). Then whole runs are simulated
(`scale_model`) at every size, with GPUs as declared in `scale_world`, in four variants:

* ours: as it is, a node for every engine;
* by host: the same with one node for the engines of a host;
* lifted: that, and no question to the ledger costs more in a large run than in a small one (see docs/scaling.md);
* one controller: all data passes through one process, as in single-controller frameworks, on the same costs.

How many GPUs sample and how many train is what the three-zone rule of the balance report comes to at 64 GPUs. The batch
grows with the GPUs. The first model runs as ours at every size, everything else at every other size. Progress is
printed as it goes on. `--validate` compares the model with real services and clients (`scale_validate`) and adds the
comparison to FILE. `python -m bench.scale_page` makes the figures of docs/scaling.md from the record.
"""

from __future__ import annotations

import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import Report, parser, write_json
from bench.scale_costs import Costs
from bench.scale_ledger import measure_ledger
from bench.scale_model import Simulation
from bench.scale_parts import measure_parts
from bench.scale_state import Outcome
from bench.scale_validate import validate
from bench.scale_world import MODELS, Model, World, by_host, centralised, world_of

BALANCED_AT = 64
# Steps until the window has passed once, then counted steps, with at least this many samples.
WARM, COUNTED, SAMPLES = 7, 3, 4000
MOST_SECONDS = 1800.0  # simulated; where the ledger is full, fewer steps are counted
FEWER_SIZES = (8, 64, 512, 1024, 4096)  # of all series but the first
CONTROLLER = "one controller"
VARIANTS: dict[str, Callable[[World, Costs], tuple[World, Costs]]] = {
    "ours": lambda world, costs: (world, costs),
    "by host": lambda world, costs: (by_host(world), costs),
    "lifted": lambda world, costs: (by_host(world), costs.flat()),
    CONTROLLER: lambda world, costs: (centralised(world), costs),
}
LIFTS = {
    "rollout GPUs": "more GPUs that sample",
    "training GPUs": "more GPUs that train",
    "ledger": "fewer or cheaper questions, then several ledgers",
    "units": "more storage units",
    "disks": "more storage units",
    "gateways": "several gateways for an engine",
    "weight server": "a tree of relays",
    "relays": "more relays",
}


@dataclass(frozen=True)
class Point:
    model: str
    variant: str
    gpus: int
    engines: int
    ranks: int
    outcome: Outcome

    @property
    def per_gpu(self) -> float:
        return self.outcome.rate / self.gpus


def run(world: World, costs: Costs) -> Outcome:
    """Small batches differ more from each other: more of them count."""
    counted = max(COUNTED, SAMPLES // (world.groups * world.group_size))
    gc.disable()  # millions of events and no cycles
    return Simulation(world, costs).run(counted, WARM, MOST_SECONDS)


def balanced(model: Model, costs: Costs) -> float:
    """The share of GPUs that sample, by the three-zone rule: it moves them until it says that they are right."""
    engines = BALANCED_AT // model.engine_gpus
    nodes, best = engines // 2, (0.0, 0.5)
    for _ in range(6):
        world = world_of(BALANCED_AT, model, costs.parts, nodes * model.engine_gpus)
        outcome = run(world, costs.flat())
        best = max(best, (outcome.rate, nodes / engines))
        if outcome.decision.branch == "hold":
            break
        # Move half of the way: a GPU for sampling is taken from the trainer, which then consumes less.
        nodes = min(max(1, round((nodes + outcome.decision.target) / 2)), engines - 1)
    return best[1]


@dataclass(frozen=True)
class Job:
    model: Model
    variant: str
    gpus: int
    share: float  # of the GPUs that sample
    costs: Costs


def simulate(job: Job) -> Point:
    engines = job.gpus // job.model.engine_gpus
    sampling = min(max(1, round(job.share * engines)), engines - 1)
    plain = world_of(job.gpus, job.model, job.costs.parts, sampling * job.model.engine_gpus)
    world, costs = VARIANTS[job.variant](plain, job.costs)
    return Point(job.model.name, job.variant, job.gpus, sampling, world.ranks, run(world, costs))


def jobs_of(models: Sequence[Model], shares: Sequence[float], costs: Costs, sizes: Sequence[int]) -> Iterator[Job]:
    """The first model in all variants, the others as ours. Only the first series has every size."""
    for model, share in zip(models, shares, strict=True):
        for variant in VARIANTS if model is models[0] else list(VARIANTS)[:1]:
            every = model is models[0] and variant == "ours"
            for gpus in sizes if every else [size for size in sizes if size in FEWER_SIZES]:
                yield Job(model, variant, gpus, share, costs)


def simulate_all(models: Sequence[Model], costs: Costs, sizes: Sequence[int]) -> list[Point]:
    """The longest first, as many at once as there are cores."""
    began = time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        shares = list(pool.map(balanced, models, [costs] * len(models)))
        jobs = list(jobs_of(models, shares, costs, sizes))
        tasks = {pool.submit(simulate, job): job for job in sorted(jobs, key=lambda job: -job.gpus)}
        points: dict[Job, Point] = {}
        for task in as_completed(tasks):
            point = points[tasks[task]] = task.result()
            told = f"{point.model}, {point.variant}, {point.gpus} GPUs: {point.outcome.rate:.1f} samples/s"
            minutes = (time.monotonic() - began) / 60
            print(f"{len(points)} of {len(jobs)} simulated in {minutes:.1f} min; {told}", file=sys.stderr, flush=True)
    return [points[job] for job in jobs]


# ---------------------------------------------------------------- telling


def kept(points: Sequence[Point], start: int, end: int) -> float | None:
    """The share of a GPU's throughput at `start` GPUs that is left at `end`."""
    found = {point.gpus: point.per_gpu for point in points}
    return found[end] / found[start] if start in found and end in found else None


def show(points: Sequence[Point]) -> None:
    first = points[0]
    table = Table(title=f"{first.model}, {first.variant}")
    for heading in ("GPUs", "sample+train", "samples/s", "per GPU, of 8", "ledger", "trainers", "engines", "limit"):
        table.add_column(heading, justify="right")
    for point in points:
        outcome = point.outcome
        table.add_row(
            f"{point.gpus:,}",
            f"{point.engines}+{point.ranks}",
            f"{outcome.rate:,.1f}",
            f"{point.per_gpu / first.per_gpu:.0%}",
            f"{outcome.busy['ledger']:.0%}",
            f"{outcome.busy['training GPUs']:.0%}",
            f"{outcome.busy['rollout GPUs']:.0%}",
            f"{outcome.bottleneck}: {LIFTS[outcome.bottleneck]}",
        )
    Console(stderr=True, width=140).print(table)


def add_points(report: Report, series: dict[tuple[str, str], list[Point]]) -> None:
    """The peer of ours is one controller at the same size, where that was simulated."""
    for (model, variant), points in series.items():
        others = {point.gpus: point for point in series.get((model, CONTROLLER), [])}
        for point in points:
            peer = others.get(point.gpus) if variant != CONTROLLER else None
            name, unit = f"{model}, {variant}, {point.gpus} GPUs", "samples/s"
            told = f"limit: {point.outcome.bottleneck}"
            other = peer.outcome.rate if peer and peer.outcome.rate else None
            report.add(name, point.outcome.rate, other, unit=unit, reason=told)
        share = kept(points, 64, 512)
        if share is not None:
            name = f"{model}, {variant}: kept per GPU from 64 to 512"
            report.add(name, 100 * share, 80.5, unit="% (peer: DistFlow's, published)", goal=1.0)


def _plain(point: Point) -> dict[str, Any]:
    outcome = point.outcome
    return {
        "model": point.model,
        "variant": point.variant,
        "gpus": point.gpus,
        "engines": point.engines,
        "ranks": point.ranks,
        "samples_per_second": outcome.rate,
        "steps": outcome.steps,
        "wait": outcome.wait,
        "staleness": outcome.staleness,
        "expired": outcome.expired,
        "bottleneck": outcome.bottleneck,
        "busy": outcome.busy,
        "latency": outcome.latency,
    }


def add_validation(path: Path, *, quick: bool) -> None:
    """Compare the model, with the costs of the record at `path`, with real runs; add the result to the record."""
    record = json.loads(path.read_text())
    report = Report("scale")
    validate(report, Costs.load(record["costs"]), quick=quick)
    command = shlex.join(["python", "-m", "bench.scale", *sys.argv[1:]])
    record["validation"] = {"command": command, "results": report.results}
    write_json(record, str(path))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--validate", action="store_true", help="compare the model of FILE with real runs")
    arguments.add_argument("--costs", type=Path, metavar="FILE", help="take the costs from an earlier result")
    arguments.add_argument("--models", default="8B,1.7B,32B", help="the first in all variants, the others as ours")
    arguments.add_argument("--most", type=int, default=4096, help="largest number of GPUs")
    given = arguments.parse_args()
    if given.validate:
        if given.costs is None:
            arguments.error("--validate needs --costs FILE")
        add_validation(given.costs, quick=given.quick)
        return
    if given.costs is not None:
        costs = Costs.load(json.loads(given.costs.read_text())["costs"])
    else:
        nodes = (8, 64) if given.quick else (8, 64, 256, 1024)
        costs = Costs(measure_ledger(nodes, 200 if given.quick else 400), measure_parts(quick=given.quick))
    report = Report("scale")
    sizes = [size for size in (2**power for power in range(3, 13)) if size <= (256 if given.quick else given.most)]
    series: dict[tuple[str, str], list[Point]] = {}
    for point in simulate_all([MODELS[name] for name in given.models.split(",")], costs, sizes):
        series.setdefault((point.model, point.variant), []).append(point)
    for points in series.values():
        show(points)
    add_points(report, series)
    points = [_plain(point) for some in series.values() for point in some]
    report.finish(given.json, costs=costs.dump(), points=points)


if __name__ == "__main__":
    main()

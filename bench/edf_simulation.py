"""How many groups expire before a trainer gets to them: earliest deadline first against first in, first out.

A discrete-event simulation around the samplers that a run uses. Slots play groups whose lengths have a long tail; a
group's oldest token is of the version at which it was begun. A trainer takes a batch, whichever groups the sampler
picks, and a step later the version moves; groups that are further behind than the bound then expire unserved. The slots
could produce more than the trainer consumes, but begin nothing while (staleness + 1) batches are between begin and end,
as the dataflow's admission does. So a group that expires was played for nothing and another one is played in its place.

`order` counts arrivals in the buffer, which is what a first-in-first-out buffer goes by. (In a run it is the order of
admission, so our own `fifo` is milder than that of its peers.)
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import Report, parser
from rillflow.contracts import Sampler
from rillflow.dataflow.hooks.samplers import EarliestDeadline, Fifo

SAMPLERS: dict[str, Callable[[], Sampler]] = {"earliest_deadline": EarliestDeadline, "fifo": Fifo}


@dataclass(frozen=True)
class World:
    """Time is in trainer steps, lengths in units of their mean. The defaults are those under which a FIFO buffer
    expires about as much as was published of one, 17 % of what is produced."""

    slots: int = 128
    batch: int = 32
    staleness: int = 8
    surplus: float = 1.2  # what the slots could produce, over what the trainer consumes
    sigma: float = 1.0  # standard deviation of the logarithm of a length
    steps: int = 300
    warmup: int = 50  # steps before anything is counted

    @property
    def window(self) -> int:
        return (self.staleness + 1) * self.batch

    @property
    def seconds_per_length(self) -> float:
        return self.slots / (self.surplus * self.batch)


@dataclass(frozen=True)
class Outcome:
    """`length_bias` is the mean length of the expired over the mean length of all; 0 where nothing expired."""

    produced: int
    expired: int
    length_bias: float
    steps_per_second: float

    @property
    def expired_share(self) -> float:
        return self.expired / self.produced


@dataclass
class SimulatedGroup:
    """A ReadyGroup; what no sampler here looks at is left at its default."""

    id: str
    order: int
    oldest: int
    length: float
    staleness: int = 0
    tokens: int = 0
    spread: float = 1.0
    served: int = 0


@dataclass
class _Run:
    sampler: Sampler
    world: World
    random: np.random.Generator
    now: float = 0.0
    version: int = 0
    leased: int = 0
    begun: int = 0
    playing: list[tuple[float, int, int, float]] = field(default_factory=list)  # end, number, version, length
    ready: list[SimulatedGroup] = field(default_factory=list)
    step_ends: float = np.inf
    produced: list[float] = field(default_factory=list)
    expired: list[float] = field(default_factory=list)

    def go(self) -> None:
        while self.version < self.world.steps:
            self._begin()
            if not self.leased and len(self.ready) >= self.world.batch:
                self._lease()
            elif self.playing and self.playing[0][0] < self.step_ends:
                self._arrive()
            else:
                self._end_step()

    def _begin(self) -> None:
        sigma = self.world.sigma
        while (
            len(self.playing) < self.world.slots
            and len(self.playing) + len(self.ready) + self.leased < self.world.window
        ):
            length = float(self.random.lognormal(-(sigma**2) / 2, sigma))
            end = self.now + length * self.world.seconds_per_length
            heapq.heappush(self.playing, (end, self.begun, self.version, length))
            self.begun += 1

    def _arrive(self) -> None:
        self.now, number, oldest, length = heapq.heappop(self.playing)
        if self.version >= self.world.warmup:
            self.produced.append(length)
        arrived = self.ready[-1].order + 1 if self.ready else 0
        self.ready.append(SimulatedGroup(str(number), arrived, oldest, length, self.version - oldest))
        self._expire()

    def _lease(self) -> None:
        picked = set(self.sampler.pick(self.ready, self.world.batch))
        self.ready = [group for group in self.ready if group.id not in picked]
        self.leased, self.step_ends = len(picked), self.now + 1.0

    def _end_step(self) -> None:
        self.now, self.step_ends, self.leased = self.step_ends, np.inf, 0
        self.version += 1
        for group in self.ready:
            group.staleness = self.version - group.oldest
        self._expire()

    def _expire(self) -> None:
        late = [group for group in self.ready if group.staleness > self.world.staleness]
        if late:
            self.ready = [group for group in self.ready if group.staleness <= self.world.staleness]
        if self.version >= self.world.warmup:
            self.expired += [group.length for group in late]


def simulate(sampler: Sampler, seed: int, world: World | None = None) -> Outcome:
    """Return the fate of the groups that a world with this seed produces."""
    world = world or World()
    run = _Run(sampler, world, np.random.default_rng(seed))
    run.go()
    bias = statistics.fmean(run.expired) / statistics.fmean(run.produced) if run.expired else 0.0
    return Outcome(len(run.produced), len(run.expired), bias, run.version / run.now)


def medians(name: str, seeds: Sequence[int], world: World | None = None) -> dict[str, float]:
    outcomes = [simulate(SAMPLERS[name](), seed, world) for seed in seeds]
    measures = ("expired_share", "length_bias", "steps_per_second")
    return {each: statistics.median(getattr(outcome, each) for outcome in outcomes) for each in measures}


def table(seeds: Sequence[int], worlds: Sequence[World]) -> Table:
    found = Table("sigma", "sampler", "expired", "length of expired / all", title=f"medians of {len(seeds)} seeds")
    for world in worlds:
        for name in SAMPLERS:
            row = medians(name, seeds, world)
            found.add_row(f"{world.sigma}", name, f"{row['expired_share']:.1%}", f"{row['length_bias']:.2f}")
    return found


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    seeds = range(3 if arguments.quick else 5)
    worlds = [World(sigma=sigma) for sigma in (0.3, 0.5, 0.7, 1.0)]
    Console(stderr=True).print(table(seeds, worlds))
    report = Report("edf_simulation")
    fifo, edf = (medians(name, seeds) for name in ("fifo", "earliest_deadline"))
    share = "expired_share"
    report.add("expired, EDF (peer: FIFO)", edf[share], fifo[share], unit="of produced", goal=1.5, less_is_better=True)
    for name, found in (("EDF", edf), ("FIFO", fifo)):
        report.add(f"length of expired / all, {name}", found["length_bias"], None, unit="ratio")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()

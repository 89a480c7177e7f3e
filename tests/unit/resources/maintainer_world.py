"""A scripted run and executor, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.config.runs import ScalingConfig
from rillflow.dataflow.balance import decide
from rillflow.errors import RunError
from rillflow.resources.maintainer.loop import Maintainer
from rillflow.resources.maintainer.pool import Book, Line
from rillflow.types import NodeInfo
from rillflow.types.balance import Balance, Decision, NodeReport, Production, Report, Window


class Killed(BaseException):
    """The maintainer is killed here."""


@dataclass
class SetClock:
    time: float = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def info(name: str, **facts: object) -> NodeInfo:
    usual = {
        "state": "healthy",
        "active": "rollout",
        "leaving": False,
        "capacity": 8,
        "held": 8,
        "completed": 0,
        "failed": 0,
        "pace": None,
        "seen": 0.0,
        "versions": {"agent": 0},
        "stats": {},
        "throughput": 0.0,
    }
    return NodeInfo(name=name, **(usual | facts))  # type: ignore[arg-type]


def make_report(
    version: int,
    waiting: float | None,
    nodes: dict[str, float],
    *,
    entered: int = 100,
    consumed: int = 100,
    suspects: tuple[str, ...] = (),
    gpus: int = 1,
) -> Report:
    """A report of nodes by their throughput."""
    total = gpus * len(nodes)
    decision: Decision = decide(total, waiting, entered, consumed)
    return Report(
        policy="agent",
        version=version,
        time=0.0,
        window=Window(
            since=0,
            steps=10,
            counted=10,
            wall_seconds=10.0,
            eval_seconds=0.0,
            training_seconds=10.0,
            step_seconds=1.0,
            batch_wait_seconds=waiting,
            wait_fraction=waiting,
        ),
        production=Production(
            gpus=total,
            produced=entered,
            entered=entered,
            accept_rate=1.0,
            consumed=consumed,
            stale_skipped=0,
            stale_rate=0.0,
            throughput_per_gpu=1.0,
            produce_consume_ratio=1.0,
        ),
        decision=decision,
        nodes=[
            NodeReport(
                id=name,
                gpus=gpus,
                produced=10,
                accepted=10,
                accept_rate=1.0,
                throughput_per_gpu=rate,
                state="suspect" if name in suspects else "healthy",
            )
            for name, rate in nodes.items()
        ],
    )


@dataclass
class World:
    """Nodes join `delay` seconds after their start and, by default, leave at once when they are retired. `trip` is
    called at every action, and may kill the maintainer."""

    folder: Path
    scaling: ScalingConfig
    clock: SetClock = field(default_factory=SetClock)
    delay: float = 3.0
    infos: dict[str, NodeInfo] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    latest: Report | None = None
    over: bool = False
    broken: bool = False
    stubborn: bool = False
    own_workers: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    trip: Callable[[str], None] = lambda what: None

    def maintainer(self, *, follow: bool = True, start_timeout: float = 60.0) -> Maintainer:
        """As a new process would make it."""
        return Maintainer(
            RunSide(self),
            ExecutorSide(self),
            _Book(self.folder, self.trip),
            self.scaling,
            start_timeout=start_timeout,
            workers=_Workers(self),
            follow=follow,
            clock=self.clock,
        )

    async def after(self, seconds: float, maintainer: Maintainer, every: float = 2.0) -> None:
        """Let time pass, with the maintainer's rounds in it."""
        end = self.clock.time + seconds
        while self.clock.time < end:
            self.clock.time += every
            self.grow_up()
            await maintainer.tick()

    def grow_up(self) -> None:
        for name, since in self.running.items():
            if name not in self.infos and name not in self.dead and self.clock.time - since >= self.delay:
                self.infos[name] = info(name)

    def report(self, version: int, waiting: float | None, **facts: object) -> None:
        rates = facts.pop("rates", {})
        here = {name: rates.get(name, 1.0) for name, i in self.infos.items() if i.state == "healthy"}  # type: ignore[attr-defined]
        self.latest = make_report(version, waiting, here, **facts)  # type: ignore[arg-type]

    @property
    def alive(self) -> set[str]:
        return {name for name, i in self.infos.items() if i.state == "healthy"}


class RunSide:
    """The run as the maintainer sees it."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ended(self) -> bool:
        return self._world.over

    async def balance(self) -> Balance:
        return Balance(latest=self._world.latest, current=make_report(0, None, {}))

    async def nodes(self) -> list[NodeInfo]:
        return list(self._world.infos.values())

    async def retire(self, node: str, drain: float) -> None:
        world = self._world
        world.trip(f"retire {node}")
        world.log.append(f"retire {node}")
        if node in world.infos and not world.stubborn:
            world.infos[node] = info(node, state="left", leaving=True)
            world.dead.add(node)
        world.trip(f"retired {node}")


class ExecutorSide:
    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, node: str) -> None:
        world = self._world
        world.trip(f"start {node}")
        world.log.append(f"start {node}")
        assert node not in world.running, f"{node} is started twice"
        if world.broken:
            raise RunError("no machine is free", "wait")
        world.running[node] = world.clock.time
        world.trip(f"started {node}")

    async def stop(self, node: str) -> None:
        world = self._world
        world.trip(f"stop {node}")
        world.log.append(f"stop {node}")
        world.running.pop(node, None)
        if node in world.alive:
            world.infos[node] = info(node, state="gone")
        world.trip(f"stopped {node}")

    async def nodes(self) -> dict[str, bool]:
        return {node: node not in self._world.dead for node in self._world.running}

    async def close(self) -> None: ...


class _Workers:
    def __init__(self, world: World) -> None:
        self._world = world

    def playing(self) -> list[str]:
        return list(self._world.own_workers)

    def take(self, node: str) -> None:
        self._world.trip(f"take {node}")
        self._world.own_workers.remove(node)
        self._world.infos[node] = info(node, state="left", leaving=True)
        self._world.log.append(f"take {node}")

    def give(self, node: str) -> None:
        self._world.trip(f"give {node}")
        self._world.own_workers.append(node)
        self._world.infos[node] = info(node)
        self._world.log.append(f"give {node}")


class _Book(Book):
    """Killed before or after each of its writes, or between the state and its line."""

    def __init__(self, folder: Path, trip: Callable[[str], None]) -> None:
        self._trip = trip
        super().__init__(folder)

    def commit(self, line: Line | None = None) -> None:
        self._trip("write")
        super().commit(line)
        self._trip("written")

    def _append(self, line: Line) -> None:
        self._trip("line")
        super()._append(line)

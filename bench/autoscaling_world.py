"""A pool of rollout nodes and a trainer as a discrete-event model, for `bench.autoscaling`.

A node plays `SLOTS` groups at once, each for a time drawn from a long-tailed distribution; decoding is bound by memory
bandwidth, so a node that plays fewer groups plays none of them faster. Admission is capped as the dataflow service caps
it: (staleness + 1) batches between begin and training. The trainer takes a batch as soon as one is ready and trains
for a fixed time. How long a group takes changes over the run: answers grow, then shrink.

Reports are made by `rillflow.dataflow.balance.make_report` from the model's counters; the maintainer is the real one,
with its state on a disk, and reaches the model through the two protocols by which it reaches a run and an executor.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rillflow.dataflow.balance import Counts, Look, Mark, NodeLook, Step, make_report, mark_of
from rillflow.types import NodeInfo
from rillflow.types.balance import Balance, Report

SLOTS = 8  # groups that a node plays at once
GROUP = 8  # samples of a group
BATCH = 32  # groups of a batch
STALENESS = 8
TRAIN = 70.0  # seconds of a step without its wait
EVERY = 10  # versions between two reports
BOOT = 180.0  # seconds from a node's start to its first task: scheduler, engine, weights
SIGMA = 0.6  # of the logarithm of a group's time


def need(progress: float) -> float:
    """Nodes that would just feed the trainer, at this share of the run: answers grow for the first part of it, then
    the policy learns to be brief."""
    low, high, end, turn = 6.0, 11.5, 7.0, 0.55
    if progress < turn:
        return low + (high - low) * progress / turn
    return high + (end - high) * (progress - turn) / (1 - turn)


@dataclass
class Node:
    name: str
    up: float
    made: int = 0
    used: int = 0
    playing: int = 0
    leave: float | None = None
    gone: float | None = None
    begun: float = 0.0


@dataclass
class World:
    """One run of `steps` steps with a pool that `maintain` (called every `poll` seconds) may change."""

    steps: int
    seed: int
    poll: float = 30.0
    now: float = 0.0
    version: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    latest: Report | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ready: list[str] = []  # nodes that made the groups that wait for the trainer
        self._begun = 0
        self._trained = 0
        self._steps: list[Step] = []
        self._mark = Mark(time=0.0, version=0)
        self._entered = 0
        self._training = False
        self._waiting_since = 0.0

    # ------------------------------------------------------------ events

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def run(self, maintain: Callable[[], None]) -> None:
        def poll() -> None:
            maintain()
            self.at(self.now + self.poll, poll)

        self.at(0.0, poll)
        while self.version < self.steps:
            self.now, _, what = heapq.heappop(self._events)
            what()

    # ------------------------------------------------------------ nodes

    def start(self, name: str, boot: float = BOOT) -> None:
        self.nodes[name] = Node(name, up=self.now + boot, begun=self.now)
        self.at(self.now + boot, self._fill)

    def retire(self, name: str, drain: float) -> None:
        node = self.nodes[name]
        if node.leave is None:
            node.leave = self.now + drain
            self.at(node.leave, lambda: self.stop(name))
            self._leave_when_empty(node)

    def stop(self, name: str) -> None:
        """Its tasks return, and are played again elsewhere."""
        node = self.nodes[name]
        if node.gone is None:
            node.gone = self.now
            self._begun -= node.playing
            node.playing = 0
            self._fill()

    def _leave_when_empty(self, node: Node) -> None:
        if node.leave is not None and node.playing == 0 and node.gone is None:
            node.gone = self.now

    def _fill(self) -> None:
        """Give groups to free slots, the emptiest node first, as far as admission goes."""
        while self._begun - self._trained < (STALENESS + 1) * BATCH:
            free = [n for n in self.nodes.values() if self._takes(n) and n.playing < SLOTS]
            if not free:
                return
            node = min(free, key=lambda n: n.playing)
            node.playing += 1
            self._begun += 1
            mean = need(self.version / self.steps) * SLOTS * TRAIN / BATCH
            seconds = mean * self._random.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
            self.at(self.now + seconds, lambda node=node: self._played(node))  # type: ignore[misc]

    def _takes(self, node: Node) -> bool:
        return node.gone is None and node.leave is None and node.up <= self.now

    def _played(self, node: Node) -> None:
        if node.gone is not None:
            return
        node.playing -= 1
        node.made += GROUP
        self._entered += GROUP
        self._ready.append(node.name)
        self._leave_when_empty(node)
        self._fill()
        self._train()

    # ------------------------------------------------------------ the trainer

    def _train(self) -> None:
        if self._training or len(self._ready) < BATCH:
            return
        taken, self._ready = self._ready[:BATCH], self._ready[BATCH:]
        self._training = True
        wait = self.now - self._waiting_since
        self.at(self.now + TRAIN, lambda: self._commit(taken, wait))

    def _commit(self, taken: list[str], wait: float) -> None:
        self.version += 1
        self._trained += BATCH
        for name in taken:
            self.nodes[name].used += GROUP
        self._steps.append(Step(self.version, self.now, TRAIN, wait))
        self._training, self._waiting_since = False, self.now
        if self.version % EVERY == 0:
            look = self._look()
            self.latest, self._mark = make_report("policy", self._mark, look), mark_of(look)
        self._fill()
        self._train()

    # ------------------------------------------------------------ what is seen of it

    def _look(self) -> Look:
        nodes = [
            NodeLook(
                name=node.name,
                seen=self.now if node.gone is None else node.gone,
                gone=node.gone is not None,
                gpus=1,
                version=self.version if node.up <= self.now else None,
                counts=Counts(completed=node.made, produced=node.made, accepted=node.made, consumed=node.used),
            )
            for node in self.nodes.values()
            if node.up <= self.now
        ]
        steps = [step for step in self._steps if step.version > self._mark.version]
        return Look(self.now, self.version, max(self.version - 1, 0), self._entered, steps, [], nodes)

    def balance(self) -> Balance:
        return Balance(latest=self.latest, current=make_report("policy", self._mark, self._look()))

    def infos(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                name=node.name,
                state="healthy" if node.gone is None else "left",
                active="rollout",
                leaving=node.leave is not None,
                capacity=SLOTS,
                held=node.playing,
                completed=node.made,
                failed=0,
                pace=None,
                throughput=0.0,
                seen=0.0,
                versions={"policy": self.version},
                stats={},
            )
            for node in self.nodes.values()
            if node.up <= self.now
        ]

    # ------------------------------------------------------------ what it costs

    def node_seconds(self) -> float:
        """From a node's start, its boot included, until it has gone."""
        return sum((node.gone if node.gone is not None else self.now) - node.begun for node in self.nodes.values())

    def wait_fraction(self) -> float:
        waited = math.fsum(step.wait for step in self._steps)
        return waited / (waited + TRAIN * len(self._steps))

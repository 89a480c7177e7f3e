"""Nodes of different speed on a real ledger, in simulated time: all capacity is used, and no node waits for slow
ones."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from dataflow_world import World, prompts

USUAL, SLOWER = 1.0, 4.0
COMMON = {"group_size": 4, "total_steps": 10**6, "source": prompts(5000)}


@dataclass
class Player:
    """A node: how many episodes it plays at once, and the seconds of one."""

    pace: float = USUAL
    capacity: int = 8
    playing: int = 0
    done: list[float] = field(default_factory=list)  # when


class Pool:
    """Plays and trains by events. The trainer takes `step` seconds for every batch."""

    def __init__(self, world: World, step: float = 0.0, **nodes: Player) -> None:
        self.world, self.nodes, self.step = world, nodes, step
        self.steps: list[float] = []
        self.late = 0  # episodes that were too old when they ended
        self.places: dict[str, Counter[str]] = {}
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = itertools.count()
        self._random = random.Random(5)
        self._training = False
        for name in nodes:
            self._beat(name)

    def run(self, seconds: float = 1e9, steps: int = 10**9) -> None:
        end, last = self.world.clock.time + seconds, len(self.steps) + steps
        self._move()
        while self._events and len(self.steps) < last and self._events[0][0] <= end:
            time, _, kind, what = heapq.heappop(self._events)
            self.world.clock.time = time
            if kind == "step":
                self.world.commit(what)
                self.steps.append(time)
                self._training = False
            elif kind == "beat":
                self._beat(str(what))
            else:
                self.nodes[kind].playing -= 1
                self.nodes[kind].done.append(time)
                self.late += not self.world.done(what, node=kind, seconds=time - what.began).accepted
            self._move()

    def _move(self) -> None:
        if not self._training and (batch := self.world.ask().batch) is not None:
            self._training = True
            self._later(self.step, "step", batch)
        for name in self._random.sample(list(self.nodes), len(self.nodes)):
            node = self.nodes[name]
            for lease in (
                self.world.lease(node.capacity - node.playing, node=name) if node.capacity > node.playing else ()
            ):
                node.playing += 1
                self.places.setdefault(lease.task.group, Counter())[name] += 1
                self._later(node.pace * self._random.uniform(0.8, 1.2), name, _Begun(lease, self.world.clock.time))

    def _beat(self, name: str) -> None:
        self.world.beat(node=name, version=self.world.head, capacity=self.nodes[name].capacity)
        self._later(2.0, "beat", name)

    def _later(self, seconds: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (self.world.clock.time + seconds, next(self._numbers), kind, what))

    def rate(self, name: str, since: float) -> float:
        """Episodes a second."""
        done = [time for time in self.nodes[name].done if time > since]
        return len(done) / (self.world.clock.time - since)

    def rates(self, since: float) -> dict[str, float]:
        return {name: self.rate(name, since) for name in self.nodes}


class _Begun:
    """A lease, and when it was given."""

    def __init__(self, lease, began: float) -> None:
        self.task, self.attempt, self.began = lease.task, lease.attempt, began


def usual(number: int) -> dict[str, Player]:
    return {f"u{n}": Player() for n in range(number)}


def stream(make_world, groups: int) -> World:
    """A window of `groups` groups of four."""
    return make_world(staleness=groups // 2 - 1, batch_groups=2, **COMMON)


def test_with_work_for_all_every_node_brings_what_it_can(make_world):
    pool = Pool(stream(make_world, 60), **usual(3), slow=Player(SLOWER * USUAL))
    pool.run(15)
    since = pool.world.clock.time
    pool.run(25)
    rates = pool.rates(since)
    assert pool.late == 0
    assert sum(rates.values()) == pytest.approx(3.25 * 8, rel=0.1)
    assert rates["slow"] == pytest.approx(2.0, rel=0.15)


def test_where_there_is_too_little_a_slow_node_keeps_it_from_nobody(make_world):
    """A window of 16 tasks for 32 hands."""
    alone = Pool(stream(make_world, 4), **usual(3))
    alone.run(40)
    pool = Pool(stream(make_world, 4), **usual(3), slow=Player(SLOWER * USUAL))
    pool.run(10)
    since = pool.world.clock.time
    pool.run(30)
    rates = pool.rates(since)
    assert rates["slow"] > 0  # it is not starved
    assert sum(rates.values()) > 0.85 * sum(alone.rates(1010.0).values())


def test_nobody_waits_for_a_slow_node_at_the_end_of_a_batch(make_world):
    """On-policy, a batch of 32 tasks: two rounds of the usual nodes, or one of the slow, which takes twice as long."""
    options = {"staleness": 0, "batch_groups": 8} | COMMON
    alone = Pool(make_world(**options), **usual(3))
    alone.run(steps=16)
    pool = Pool(make_world(**options), **usual(3), slow=Player(SLOWER * USUAL))
    pool.run(steps=16)
    seconds = [pool.steps[-1] - pool.steps[4], alone.steps[-1] - alone.steps[4]]
    assert seconds[0] < 1.25 * seconds[1]  # now and then it is tried again


def test_a_large_batch_is_worth_a_slow_nodes_help(make_world):
    options = {"staleness": 0, "batch_groups": 64} | COMMON
    alone = Pool(make_world(**options), **usual(3))
    alone.run(steps=3)
    pool = Pool(make_world(**options), **usual(3), slow=Player(SLOWER * USUAL))
    pool.run(steps=3)
    assert pool.steps[-1] - pool.steps[0] < alone.steps[-1] - alone.steps[0]


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_node_that_recovers_is_trusted_again(make_world, staleness):
    world = make_world(staleness=staleness, batch_groups=4, **COMMON)
    pool = Pool(world, **usual(2), slow=Player(SLOWER * USUAL))
    pool.run(20)
    pool.nodes["slow"].pace = USUAL
    pool.run(50)
    since = world.clock.time
    pool.run(20)
    rates = pool.rates(since)
    assert rates["slow"] > 0.6 * min(rates["u0"], rates["u1"])


def test_groups_stay_together_where_they_can(make_world):
    pool = Pool(stream(make_world, 60), **usual(3), slow=Player(SLOWER * USUAL))
    pool.run(20)
    whole = [group for group in list(pool.places.values())[:-60] if sum(group.values()) == 4]
    together = sum(max(group.values()) for group in whole) / (4 * len(whole))
    assert together > 0.8

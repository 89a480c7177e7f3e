"""The state of the simulation: groups, episodes and nodes; and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.scale_queues import Engine, Server
from rillflow.types.balance import Decision


@dataclass(slots=True, eq=False)
class Group:
    oldest: int
    left: int  # episodes that have not ended
    tokens: list[int] = field(default_factory=list)
    expired: bool = False


@dataclass(slots=True, eq=False)
class Episode:
    node: Node
    group: Group
    version: int
    turn_tokens: float
    turns: int
    tokens: int  # of the sample


@dataclass(slots=True, eq=False)
class Node:
    name: int
    engine: Engine
    gateway: Server
    version: int = 0
    playing: int = 0
    asking: bool = False
    pulling: bool = False
    sending: int = 0
    unsent: list[Episode] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """The results of the counted steps; `busy` are shares of the available time."""

    seconds: float
    steps: int
    samples: int
    expired: int
    staleness: float
    wait: float
    decision: Decision
    latency: dict[str, float]  # means, in seconds
    busy: dict[str, float]

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    @property
    def bottleneck(self) -> str:
        """What is closest to having no time left. GPUs, where nothing else holds them up."""
        return max(self.busy, key=lambda name: self.busy[name])

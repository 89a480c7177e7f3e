"""Rollout nodes: that they live, and that they leave."""

from __future__ import annotations

from rillflow.types.base import Finite, Phase, Wire


class Heartbeat(Wire, frozen=True):
    """A node lives and still plays these attempts. `active` is the tag of what its worker does now; a node that is
    `leaving` wants no more tasks. `trouble` says why an engine of it samples nothing."""

    node: str
    incarnation: str
    attempts: list[str]
    versions: dict[str, int]
    capacity: int
    stats: dict[str, Finite] = {}
    active: str = "rollout"
    leaving: bool = False
    trouble: str = ""


class HeartbeatReply(Wire, frozen=True):
    """`lost`: attempts whose lease is gone; the node stops playing them. `leave`: somebody has retired the node; it
    ends what it plays within so many seconds, hands the rest back and goes. None: it stays."""

    lost: list[str]
    heads: dict[str, int]
    phase: Phase
    leave: float | None = None


class LeaveRun(Wire, frozen=True):
    """A node goes for good: what it still holds returns at once, and nobody waits for it."""

    node: str
    incarnation: str


class RetireNode(Wire, frozen=True):
    """Somebody wants a node to go: it gets no more tasks, and `drain` seconds to end those it has. 0: none."""

    node: str
    drain: Finite = 120.0


class NodeInfo(Wire, frozen=True):
    """A rollout node as the run knows it, heard of `seen` seconds ago. `pace` is the mean seconds of its episodes,
    `throughput` the samples that it has brought each second of late. State: healthy, gone or left."""

    name: str
    state: str
    active: str
    leaving: bool
    capacity: int
    held: int
    completed: int
    failed: int
    pace: float | None
    throughput: float
    seen: float
    versions: dict[str, int]
    stats: dict[str, float]


class NodeList(Wire, frozen=True):
    nodes: list[NodeInfo]

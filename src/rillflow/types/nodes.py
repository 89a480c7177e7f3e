"""Heartbeats, retirement and states of rollout nodes."""

from __future__ import annotations

from rillflow.types.base import Finite, Phase, Wire


class Heartbeat(Wire, frozen=True):
    """A node's sign of life, with the attempts that it still plays. `active` is its worker's active tag. A node that is
    `leaving` wants no more tasks. `trouble` says why one of its engines does not sample."""

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
    """`lost` are attempts whose lease is gone; the node stops playing them. `leave` is set when the node was retired:
    it finishes episodes within that number of seconds, hands the rest back and exits."""

    lost: list[str]
    heads: dict[str, int]
    phase: Phase
    leave: float | None = None


class LeaveRun(Wire, frozen=True):
    """The report that a node leaves the run. Its leases return at once."""

    node: str
    incarnation: str


class RetireNode(Wire, frozen=True):
    """A request to retire a node: it gets no more tasks, and `drain` seconds to finish those it has."""

    node: str
    drain: Finite = 120.0


class NodeInfo(Wire, frozen=True):
    """A rollout node as the run knows it; its last heartbeat came `seen` seconds ago. `pace` is the mean duration of
    its episodes in seconds, `throughput` its recent samples a second. The state is healthy, gone or left."""

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

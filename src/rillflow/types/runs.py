"""A run: heartbeats, retirement and states of its rollout nodes, how a process on another host joins it, and its status
as people and supervisors see it.
"""

from __future__ import annotations

from typing import Any

from rillflow.types.base import Finite, Phase, TokenScope, Wire
from rillflow.types.tasks import UserError

# ---------------------------------------------------------------- rollout nodes


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


# ---------------------------------------------------------------- joining from another host


class RunRecipe(Wire, frozen=True):
    """The recipe and addresses for a process that does not see the run folder.

    `version` is that of the Rillflow that serves the run. `weights` is the address of the run's weight server, or
    empty. `trainers` are the addresses at which trainers elsewhere serve their weights, by policy. `folder` is the run
    folder, which a process on the same host may read. `digests` are those of the run's tokens, by scope: with them a
    process recognises tokens that it does not hold (`wire.tokens.Keyring`). `ledgers` are the URLs of the
    run's ledgers, in order, if it has several; empty until all of them listen.
    """

    recipe: dict[str, Any]
    version: str
    weights: str
    folder: str
    digests: dict[TokenScope, str]
    trainers: dict[str, str] = {}
    ledgers: list[str] = []


class WeightsKey(Wire, frozen=True):
    """The key with which a trainer signs weights (`weights.manifest`)."""

    key: bytes


class TellFetch(Wire, frozen=True):
    """The report that an engine fetches this version, so that the store keeps it meanwhile."""

    policy: str
    engine: str
    version: int


# ---------------------------------------------------------------- status


class StopRun(Wire, frozen=True):
    """A request to end the run. Unfinished work stays in the ledger, and a resumed run goes on with it."""

    reason: str = "stopped"


class Evaluation(Wire, frozen=True):
    """Mean reward on held-out prompts, asked for when the policy stood at `version`.

    With several sources, `reward` is the mean of their means, which are in `by_source`.
    """

    version: int
    reward: float
    episodes: int
    failed: int
    by_source: dict[str, float] = {}


class PolicyStatus(Wire, frozen=True):
    """One policy's stream: how far its trainer is and what it waits for."""

    version: int
    steps: int
    total_steps: int
    reward: float | None
    staleness: float
    wait_fraction: float
    samples_per_second: float
    ready: int


class Status(Wire, frozen=True):
    """The state of a run, as the progress view shows it. The plain numbers are the first policy's."""

    phase: Phase
    reason: str
    steps: int
    total_steps: int
    versions: dict[str, int]
    reward: float | None
    samples_per_second: float
    staleness: float
    wait_fraction: float
    counts: dict[str, int]
    evaluations: list[Evaluation]
    nodes: int
    waits: list[str]
    policies: dict[str, PolicyStatus] = {}
    units: int = 0
    notes: dict[str, str] = {}  # findings of nodes about the agents, by subject
    errors: list[UserError] = []  # of user code, the most frequent first

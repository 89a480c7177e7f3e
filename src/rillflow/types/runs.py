"""A run: its rollout nodes, how a process on another host joins it, its status, and the names of its ledgers.

A prompt belongs to exactly one ledger, by the hash of its id. Names of groups, tasks, attempts, samples and batches say
which ledger made them, so that a message about them finds its ledger without a table. The names of the first ledger,
number 0, are those of a run that has only one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from rillflow.types.base import Finite, Phase, TokenScope, Wire
from rillflow.types.leases import UserError

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


_MARK = re.compile(r"l(\d+)-")


def owner_of(prompt: str, ledgers: int) -> int:
    """Return the number of the ledger that a prompt belongs to, the same on every machine."""
    if ledgers == 1:
        return 0
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") % ledgers


def mark_of(ledger: int) -> str:
    """Return what the names that a ledger makes begin with."""
    return f"l{ledger}-" if ledger else ""


def ledger_of(name: str) -> int:
    """Return the number of the ledger that made a name."""
    found = _MARK.match(name)
    return int(found[1]) if found else 0


def process_of(ledger: int) -> str:
    """Return the name of the process that serves a ledger."""
    return f"dataflow-{ledger}" if ledger else "dataflow"


def folder_of(run: Path, ledger: int) -> Path:
    """Return where a run keeps the files of a ledger: the first one's are in the run's own folder."""
    return run / "ledgers" / str(ledger) if ledger else run

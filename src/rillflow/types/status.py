"""A run as people and supervisors see it."""

from __future__ import annotations

from rillflow.types.base import Phase, Wire
from rillflow.types.tasks import UserError


class StopRun(Wire, frozen=True):
    """Ends the run; what is outstanding stays in the ledger, so that a resumed run goes on with it."""

    reason: str = "stopped"


class Evaluation(Wire, frozen=True):
    """Mean reward on held-out prompts, asked for when the policy stood at `version`.

    Where they are of several sources, `reward` is the mean of theirs, which are in `by_source`.
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
    """One look at a run, as the progress view shows it. The plain numbers are the first policy's."""

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
    notes: dict[str, str] = {}  # what nodes have found out about the agents, by subject
    errors: list[UserError] = []  # of user code, the most frequent first

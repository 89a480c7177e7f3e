"""A run as people and supervisors see it."""

from __future__ import annotations

from rillflow.types.base import Phase, Wire
from rillflow.types.tasks import UserError


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

"""The status of a run for people and supervisors, as a whole and for each policy."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.tables import StepRow
from rillflow.dataflow.ledger.tasks import NOTES
from rillflow.types import PolicyStatus, Status

RECENT = 10


def recent_steps(ledger: Ledger, policy: str) -> list[StepRow]:
    """Return the policy's last live steps, newest first."""
    return ledger.lineage.live_steps(policy, RECENT)


def wait_fraction(steps: Sequence[StepRow]) -> float:
    """Return the share of the trainer's time that it waited for data."""
    waited = sum(step.wait_seconds for step in steps)
    total = waited + sum(step.step_seconds for step in steps)
    return waited / total if total > 0 else 0.0


def counts(ledger: Ledger) -> dict[str, int]:
    found = ledger.steps.counters()
    return found | {"tasks.pending": ledger.tasks.pending, "tasks.leased": ledger.tasks.running}


def policy_status(ledger: Ledger, policy: str) -> PolicyStatus:
    steps = recent_steps(ledger, policy)
    seconds = sum(step.wait_seconds + step.step_seconds for step in steps)
    return PolicyStatus(
        version=ledger.lineage.head(policy),
        steps=ledger.lineage.steps(policy),
        total_steps=ledger.rules.policies[policy].total_steps,
        reward=steps[0].reward if steps else None,
        staleness=steps[0].staleness if steps else 0.0,
        wait_fraction=wait_fraction(steps),
        samples_per_second=sum(step.samples for step in steps) / seconds if seconds > 0 else 0.0,
        ready=ledger.streams.servable(policy),
    )


def status(ledger: Ledger, waits: list[str]) -> Status:
    policies = {policy: policy_status(ledger, policy) for policy in ledger.rules.policies}
    first = policies[ledger.rules.policy]
    return Status(
        phase=ledger.phase,
        reason=ledger.reason,
        steps=first.steps,
        total_steps=first.total_steps,
        versions=ledger.heads,
        reward=first.reward,
        samples_per_second=first.samples_per_second,
        staleness=first.staleness,
        wait_fraction=first.wait_fraction,
        counts=counts(ledger),
        evaluations=ledger.evaluations.results(),
        nodes=ledger.nodes.healthy,
        waits=waits,
        policies=policies,
        units=ledger.storage.count,
        notes=ledger.db.meta(NOTES, {}),
        errors=ledger.user_errors.shown(),
    )

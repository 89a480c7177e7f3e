"""The status of a run, as a whole and for each policy, and its numbers for Prometheus.

The numbers are read when they are asked for. Their table is in docs/observability.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rillflow.contracts import Clock
from rillflow.dataflow.ledger.ledger import Ledger
from rillflow.dataflow.ledger.tables import StepRow
from rillflow.dataflow.ledger.tasks import NOTES
from rillflow.types import Evaluation, NodeInfo, PolicyStatus, Status

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


# ---------------------------------------------------------------- Prometheus

_OF_POLICY = {
    "version": "Version of the policy",
    "steps": "Optimizer steps on the live line",
    "total_steps": "Optimizer steps that the recipe asks for",
    "reward": "Mean reward of the last step",
    "staleness": "Mean staleness of the last batch",
    "wait_fraction": "Share of the trainer's time spent waiting for data, over its last steps",
    "samples_per_second": "Samples that the trainer consumed each second, over its last steps",
    "ready": "Groups that wait for the trainer",
}
_OF_STEP = {
    "samples": "Samples of the last step",
    "tokens": "Tokens of the last step",
    "step_seconds": "Seconds of the last step without its waits",
    "wait_seconds": "Seconds that the trainer waited for the last batch",
}
_OF_NODE = {
    "capacity": "Episodes that a node can play at once",
    "held": "Tasks that are leased to a node",
    "completed": "Episodes that a node has completed",
    "failed": "Episodes that have failed on a node",
    "pace": "Mean seconds of a node's episodes",
    "throughput": "Samples that a node brought each second of late",
    "seen": "Seconds since a node was heard of",
}


class LedgerGauges(Collector):
    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = status(self._ledger, [])
        yield _family("count", "Groups, tasks and events by state and cause", ["name"], _one_label(now.counts))
        yield GaugeMetricFamily("rillflow_nodes", "Healthy rollout nodes", value=now.nodes)
        yield GaugeMetricFamily("rillflow_units", "Storage units heard of lately", value=now.units)
        errors = sum(error.count for error in now.errors)
        yield GaugeMetricFamily("rillflow_user_errors", "Errors raised by the user's code", value=errors)
        yield from _of_policies(now.policies)
        yield from self._of_steps(now.policies)
        yield from self._of_leases()
        yield from _of_evaluations(now.evaluations)
        yield from _of_nodes(self._ledger.nodes.infos())

    def _of_steps(self, policies: Iterable[str]) -> Iterator[GaugeMetricFamily]:
        found = {policy: steps[0] for policy in policies if (steps := recent_steps(self._ledger, policy))}
        for name, text in _OF_STEP.items():
            values = [([policy], getattr(step, name)) for policy, step in found.items()]
            yield _family(f"last_{name}", text, ["policy"], values)

    def _of_leases(self) -> Iterator[GaugeMetricFamily]:
        """The oldest lease tells of what hangs: a task, or a batch that no trainer commits."""
        now, db = self._clock.now(), self._ledger.db
        task = self._ledger.tasks.oldest_lease
        yield GaugeMetricFamily(
            "rillflow_task_lease_age",
            "Seconds of the oldest lease of a task",
            value=now - (now if task is None else task),
        )
        batches = db.all("SELECT policy, min(leased_at) FROM batches WHERE state = 'leased' GROUP BY policy")
        ages = [([policy], now - since) for policy, since in batches]
        yield _family("batch_lease_age", "Seconds of the oldest lease of a batch", ["policy"], ages)


def _of_policies(policies: dict[str, PolicyStatus]) -> Iterator[GaugeMetricFamily]:
    for name, text in _OF_POLICY.items():
        values = [([policy], getattr(found, name)) for policy, found in policies.items()]
        yield _family(name, text, ["policy"], values)


def _of_evaluations(evaluations: list[Evaluation]) -> Iterator[GaugeMetricFamily]:
    last = evaluations[-1:]
    rewards = [([source], reward) for one in last for source, reward in {"": one.reward, **one.by_source}.items()]
    yield _family("heldout_reward", "Held-out reward of the last evaluation, in all and by source", ["source"], rewards)
    version = GaugeMetricFamily("rillflow_heldout_version", "Version of the first policy at the last evaluation")
    for one in last:
        version.add_metric([], one.version)
    yield version


def _of_nodes(nodes: list[NodeInfo]) -> Iterator[GaugeMetricFamily]:
    """What the service knows of each node, and the statistics that nodes send: `POLICY.name`, or `name`."""
    for name, text in _OF_NODE.items():
        yield _family(f"node_{name}", text, ["node"], [([node.name], getattr(node, name)) for node in nodes])
    versions = [([node.name, policy], version) for node in nodes for policy, version in node.versions.items()]
    yield _family("node_version", "Version that a node serves", ["node", "policy"], versions)
    stats: dict[str, list[tuple[list[str], float]]] = defaultdict(list)
    for node in nodes:
        for key, value in node.stats.items():
            policy, _, name = key.rpartition(".")
            stats[name].append(([node.name, policy], value))
    for name, values in sorted(stats.items()):
        yield _family(f"node_{name}", f"{name.replace('_', ' ').capitalize()} of a node", ["node", "policy"], values)


def _one_label(values: dict[str, int]) -> list[tuple[list[str], float]]:
    return [([name], value) for name, value in values.items()]


def _family(
    name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float | None]]
) -> GaugeMetricFamily:
    """Return the gauges `rillflow_NAME`; unknown numbers are left out."""
    family = GaugeMetricFamily(f"rillflow_{name}", text, labels=labels)
    for label, value in values:
        if value is not None:
            family.add_metric(label, value)
    return family

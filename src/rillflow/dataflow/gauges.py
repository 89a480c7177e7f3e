"""The ledger's numbers for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rillflow.dataflow.ledger import Ledger
from rillflow.dataflow.report import status

_OF_POLICY = {
    "version": "Version of the policy",
    "steps": "Optimizer steps on the live line",
    "staleness": "Mean staleness of the last batch",
    "wait_fraction": "Share of the trainer's time spent waiting for data",
    "ready": "Groups that wait for the trainer",
}


class LedgerGauges(Collector):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = status(self._ledger, [])
        counts = GaugeMetricFamily("rillflow_count", "Groups, tasks and events by state and cause", labels=["name"])
        for name, number in now.counts.items():
            counts.add_metric([name], number)
        yield counts
        for name, text in _OF_POLICY.items():
            family = GaugeMetricFamily(f"rillflow_{name}", text, labels=["policy"])
            for policy, numbers in now.policies.items():
                family.add_metric([policy], getattr(numbers, name))
            yield family
        yield GaugeMetricFamily("rillflow_nodes", "Healthy rollout nodes", value=now.nodes)
        yield GaugeMetricFamily("rillflow_units", "Storage units heard of lately", value=now.units)

"""The ledger's numbers for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rillflow.dataflow.ledger import Ledger
from rillflow.dataflow.report import status


class LedgerGauges(Collector):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = status(self._ledger, [])
        counts = GaugeMetricFamily("rillflow_count", "Groups, tasks and events by state and cause", labels=["name"])
        for name, number in now.counts.items():
            counts.add_metric([name], number)
        yield counts
        for name, value, text in (
            ("version", now.versions[self._ledger.rules.policy], "Version of the policy"),
            ("steps", now.steps, "Optimizer steps on the live line"),
            ("staleness", now.staleness, "Mean staleness of the last batch"),
            ("wait_fraction", now.wait_fraction, "Share of the trainer's time spent waiting for data"),
            ("nodes", now.nodes, "Healthy rollout nodes"),
        ):
            yield GaugeMetricFamily(f"rillflow_{name}", text, value=value)

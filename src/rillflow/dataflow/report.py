"""What people and supervisors see of a run: the status and the balance between its sides."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from rillflow.dataflow.ledger import Ledger
from rillflow.types import Status

RECENT = 10


def recent_steps(ledger: Ledger) -> list[sqlite3.Row]:
    """The last live steps, newest first."""
    return ledger.db.all(
        "SELECT * FROM steps WHERE policy = ? AND state = 'live' ORDER BY version DESC LIMIT ?",
        (ledger.rules.policy, RECENT),
    )


def wait_fraction(steps: Sequence[sqlite3.Row]) -> float:
    """The share of the trainer's time that it waited for data."""
    waited = sum(step["wait_seconds"] for step in steps)
    total = waited + sum(step["step_seconds"] for step in steps)
    return waited / total if total > 0 else 0.0


def counts(ledger: Ledger) -> dict[str, int]:
    found = ledger.batches.counters()
    return found | {"tasks.pending": ledger.tasks.pending, "tasks.leased": ledger.tasks.running}


def status(ledger: Ledger, waits: list[str]) -> Status:
    steps = recent_steps(ledger)
    seconds = sum(step["wait_seconds"] + step["step_seconds"] for step in steps)
    return Status(
        phase=ledger.phase,
        reason=ledger.reason,
        steps=ledger.lineage.steps,
        total_steps=ledger.rules.total_steps,
        versions=ledger.heads,
        reward=steps[0]["reward"] if steps else None,
        samples_per_second=sum(step["samples"] for step in steps) / seconds if seconds > 0 else 0.0,
        staleness=steps[0]["staleness"] if steps else 0.0,
        wait_fraction=wait_fraction(steps),
        counts=counts(ledger),
        evaluations=ledger.evaluations.results(),
        nodes=ledger.nodes.healthy,
        waits=waits,
    )


def balance(ledger: Ledger) -> dict[str, Any]:
    """Raw counters: how long the trainer waited, and what every node made of its leases."""
    steps = recent_steps(ledger)
    nodes = ledger.nodes.report()
    return {
        "wait_fraction": wait_fraction(steps),
        "versions": len(steps),
        "version": ledger.lineage.head,
        "outstanding": ledger.groups.outstanding,
        "window": ledger.rules.window,
        "ready": ledger.groups.count("train", "ready"),
        "healthy": sum(node["state"] == "healthy" for node in nodes.values()),
        "gone": sum(node["state"] == "gone" for node in nodes.values()),
        **{key: sum(node[key] for node in nodes.values()) for key in ("produced", "accepted", "consumed")},
        "nodes": nodes,
    }
